"""What the engine itself costs beside the model: schedule() and update_from_output(), without execute()."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.block_hash import BlockHasher, PrefixSharing
from workers.kv_cache_manager import make_kv_cache_manager
from workers.request import Request
from workers.scheduler import Scheduler
from workers.scheduler_config import SchedulerConfig
from workers.simulated_runner import SimulatedRunner

_BATCH_SIZES = (1, 32, 64, 128, 192, 256)
_PROMPT_TOKENS = 256
# A whole block, so that each window holds its share of allocations and of hashes for the prefix cache.
_WINDOW_STEPS = 16
_WINDOWS = 48
# At least as many as it takes until all prompts are computed.
_PREFILL_STEPS = 64


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """µs of one step: `us_per_step` + `us_per_sequence` for each scheduled sequence.

    `us_by_batch_size` are the figures that the two were fitted to.
    """

    us_per_step: float
    us_per_sequence: float
    us_by_batch_size: dict[int, float]


def scheduler_cost(batch_sizes: Sequence[int] = _BATCH_SIZES) -> SchedulerCost:
    """Measures decode steps of the engine's decision code with the prefix cache and the operating point on.

    For each batch size the fastest of some windows of 16 steps counts: a shared machine only ever adds.
    Takes about 2 s of one core.
    """
    by_size = {size: _us_of_step(size) for size in batch_sizes}
    mean_size = sum(by_size) / len(by_size)
    mean_us = sum(by_size.values()) / len(by_size)
    slope = sum((size - mean_size) * (us - mean_us) for size, us in by_size.items()) / sum(
        (size - mean_size) ** 2 for size in by_size
    )
    return SchedulerCost(mean_us - slope * mean_size, slope, by_size)


def _us_of_step(num_seqs: int) -> float:
    max_tokens = _WINDOWS * _WINDOW_STEPS + _PREFILL_STEPS
    config = SchedulerConfig(
        max_model_len=_PROMPT_TOKENS + max_tokens,
        max_num_seqs=num_seqs,
        inter_token_target_ms=1000.0,
        hold_batch_in_prefill=True,
    )
    num_blocks = num_seqs * -(-config.max_model_len // 16)
    kv_cache_manager = make_kv_cache_manager(
        num_blocks, hasher=BlockHasher("simulated", "none", PrefixSharing.TENANT)
    )
    scheduler = Scheduler(config, kv_cache_manager, frozenset({1}))
    runner = SimulatedRunner(vocab_size=1000, first_token_id=2)
    for number in range(num_seqs):
        request_id = number.to_bytes(16, "little")
        # Half interactive, half batch, so that the operating point has something to decide.
        priority = PriorityClass.BATCH if number % 2 else PriorityClass.INTERACTIVE
        sampling = SamplingParams(max_tokens=max_tokens)
        prompt = [2 + number] * _PROMPT_TOKENS
        scheduler.add_request(Request(request_id, 1, priority, prompt, sampling, number % 4))
    batch = scheduler.schedule()
    while len(batch.scheduled) < num_seqs or batch.total_num_scheduled_tokens > num_seqs:
        scheduler.update_from_output(batch, runner.execute(batch))
        scheduler.observe(batch, 0.001)
        batch = scheduler.schedule()
    best = float("inf")
    for _ in range(_WINDOWS):
        spent = 0.0
        for _ in range(_WINDOW_STEPS):
            sampled = runner.execute(batch)
            began = time.perf_counter()
            scheduler.update_from_output(batch, sampled)
            scheduler.observe(batch, 0.001)
            batch = scheduler.schedule()
            spent += time.perf_counter() - began
            assert len(batch.scheduled) == num_seqs
        best = min(best, spent / _WINDOW_STEPS)
    return best * 1e6


if __name__ == "__main__":
    print(scheduler_cost())
