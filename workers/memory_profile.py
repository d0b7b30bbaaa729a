"""Runs the largest steps that the settings allow and sees what memory they take."""

from itertools import cycle, islice
from typing import Protocol

from schemas.priority import PriorityClass
from schemas.records import LogitBias, SamplingParams
from workers.batch import ModelRunner, ScheduledSequence, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.memory import available_bytes, peak_bytes
from workers.pool_sizes import MemoryProfile
from workers.request import Request
from workers.scheduler_config import SchedulerConfig

# Sequences of the profile share the blocks of a small pool: what they attend to is of no matter.
NUM_SCRATCH_BLOCKS = 64
# Longer contexts take time and no memory: keys and values are read where they lie.
_DECODE_CONTEXT = 64


class ProfiledRunner(ModelRunner, Protocol):
    def free_kv_cache(self) -> None:
        """Gives the pools' memory back; `initialize_kv_cache` may then be called again."""


def profile_memory(
    runner: ProfiledRunner,
    config: SchedulerConfig,
    vocab_size: int,
    *,
    tiled: bool = False,
    num_ranks: int = 1,
) -> MemoryProfile:
    """To be called with the weights loaded and before the pools are allocated. Takes as long as two steps.

    `tiled`: the runner computes a few tokens at a time, so that a step of many prompt tokens takes no more
    memory than one of decodes, but seconds; it is left out. `num_ranks` processes run the steps on this
    machine; no other takes more than this one, which samples.

    The steps also leave kernels compiled and scratch memory allocated, which counts as theirs.
    """
    available = available_bytes()

    def work() -> None:
        runner.initialize_kv_cache(NUM_SCRATCH_BLOCKS)
        for batch in worst_batches(config, vocab_size)[tiled:]:
            runner.execute(batch)

    try:
        peak = peak_bytes(work)
    finally:
        runner.free_kv_cache()
    return MemoryProfile(available, peak * num_ranks)


def worst_batches(config: SchedulerConfig, vocab_size: int) -> list[SchedulerOutput]:
    """Two steps at the limits: all the prompt tokens that a step may have, in as many sequences as there may
    be, which all sample; and as many decodes. Sampling asks for all that costs memory.
    """
    num_seqs = config.max_num_seqs
    longest = min(config.max_prefill_chunk, config.max_model_len)
    each, more = divmod(config.max_num_batched_tokens, num_seqs)
    prompts = [min(longest, each + (index < more)) for index in range(num_seqs)]
    return [
        _step([(length, length) for length in prompts], vocab_size),
        # The canary has a seat beside them.
        _step([(min(_DECODE_CONTEXT, config.max_model_len), 1)] * (num_seqs + 1), vocab_size),
    ]


def _step(sequences: list[tuple[int, int]], vocab_size: int) -> SchedulerOutput:
    """One step from pairs (tokens known, how many of them are computed now)."""
    scheduled = [
        ScheduledSequence(_request(index, num_tokens, num_new, vocab_size), num_new, True)
        for index, (num_tokens, num_new) in enumerate(sequences)
    ]
    return SchedulerOutput(scheduled, total_num_scheduled_tokens=sum(num_new for _, num_new in sequences))


def _request(index: int, num_tokens: int, num_new: int, vocab_size: int) -> Request:
    tokens = [(index * 7919 + position * 104_729) % vocab_size for position in range(num_tokens)]
    num_output = num_tokens // 2
    first_block = index * 17 % NUM_SCRATCH_BLOCKS
    blocks = islice(cycle(range(NUM_SCRATCH_BLOCKS)), first_block, None)
    return Request(
        request_id=index.to_bytes(16, "big"),
        attempt=0,
        priority=PriorityClass.BATCH,
        prompt_token_ids=tokens[: num_tokens - num_output],
        output_token_ids=tokens[num_tokens - num_output :],
        sampling=SamplingParams(
            max_tokens=num_output + 2,
            temperature=1.0,
            top_p=0.999,
            seed=index,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias=[LogitBias(token_id=0, bias=-1.0)],
            logprobs=20,
        ),
        reply_partition=0,
        block_table=list(islice(blocks, -(-num_tokens // BLOCK_SIZE))),
        num_computed_tokens=num_tokens - num_new,
    )
