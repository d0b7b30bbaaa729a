"""Executes scheduled batches with torch: owns the weights and the KV pool, knows nothing of queues.

Nothing is kept from step to step but the pool: what a request's tokens are and where their KV lies is read
from the request in every step, so preemption, resume and cancellation need no word with the runner.
"""

import os
from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.dispatch import triton_operations
from schemas.kv_layout import KVLayout
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.decode_graphs import decode_buckets
from workers.device import device_problem
from workers.device_memory import check_fits_device
from workers.device_sampler import DeviceSampler
from workers.followers import Followers
from workers.handoff.kv_pool import Bytes
from workers.memory import available_bytes
from workers.memory_check import check_fits
from workers.model_shard import (
    FreeKVCache,
    InitializeKVCache,
    MeasureMemory,
    ModelOptions,
    ModelShard,
    RankCommand,
    RecordGraphs,
    RunStep,
    plan_shard,
)
from workers.model_step import ModelStep, StepLimits, prepare_step
from workers.models.decoder_weights import DecoderWeights
from workers.models.linear_choice import AUTO
from workers.models.open_weights import open_weights
from workers.rank_died import RankDiedError
from workers.rank_settings import SETTING, RanksError
from workers.sampler import Sampler

_STEP_TIMEOUT_S = 60.0


class TorchModelRunner:
    """A `workers.batch.ModelRunner` over torch, on CPUs or on NVIDIA GPUs.

    Fast mode batches all it can; Gemma is multiplied int8 by int8 where the machine has it, and other models
    in bf16. With `deterministic`
    all is fp32 and every token is computed by operations whose shapes depend on nothing but its own position:
    logits are equal bit for bit whatever the batch, the chunks, the history or the number of ranks (on one
    kind of machine with one number of threads in each rank).

    With `num_ranks` above 1 the model is spread over as many processes, of which this one is rank 0: it
    samples, and the others follow the batches that it is given. All have Gemma's matrices in bf16 then.

    On GPUs each rank has one, matrices are bf16 or, where the file has them so, FP8, and the KV cache is bf16
    or FP8.
    """

    def __init__(
        self,
        weights_path: Path,
        *,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 1,
        max_num_seqs: int = 1,
        deterministic: bool = False,
        num_threads: int | None = None,
        eos_token_ids: Set[int] = frozenset(),
        linear: str = AUTO,
        num_ranks: int = 1,
        step_timeout_s: float = _STEP_TIMEOUT_S,
        on_rank_died: Callable[[RankDiedError], None] = lambda error: None,
        device: str | None = None,
        fp8_kv: bool = False,
    ) -> None:
        """Loads the weights, which takes seconds. `num_threads` is torch's, for the whole process; of several
        ranks each has as many, and where it is not given an equal share of the cores.

        `linear` says how the fast mode multiplies Gemma's matrices: see `choose_linears`. `eos_token_ids` are
        kept from requests that have not reached their min_tokens. The limits of a step are for the check that
        the model fits the memory at hand, which comes before anything is loaded. A rank waits for others at
        most `step_timeout_s` in a step. `on_rank_died` is called once, from another thread, when one has
        ended; whatever is computed then raises RuntimeError. `device` is as in `ModelOptions`; `fp8_kv` is
        for GPUs.

        Raises OSError or WeightsError (a ValueError) for a file that cannot be served, RanksError for a
        number of ranks that does not go with model or machine, ValueError for a model that does not fit,
        RuntimeError when the machine's matrix library cannot keep the promise of deterministic mode, or
        another rank ends.
        """
        if num_ranks > 1 and num_threads is None:
            num_threads = max(1, num_cores() // num_ranks)
        kv_dtype = "fp8" if fp8_kv else "auto"
        if problem := device_problem(device, deterministic=deterministic, linear=linear, kv_dtype=kv_dtype):
            raise ValueError(problem)
        options = ModelOptions(
            weights_path, max_model_len, deterministic, num_threads, linear, num_ranks, device, fp8_kv
        )
        self.deterministic = deterministic
        self.dtype = options.dtype
        self._options = options
        self._num_ranks = num_ranks
        self._followers: Followers | None = None
        with open_weights(weights_path) as weights:
            _check_ranks(options, weights)
            check = (
                partial(check_fits_device, weights, options.torch_device(0), fp8_kv=fp8_kv)
                if device == "cuda"
                else partial(check_fits, weights, available_bytes(), deterministic=deterministic)
            )
            check(
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                num_ranks=num_ranks,
            )
            try:
                if num_ranks > 1:
                    self._followers = Followers(options, step_timeout_s, on_rank_died)
                self._shard = ModelShard(options, weights, 0)
                if self._followers is not None:
                    self._shard.join(self._followers.join())
            except BaseException:
                self.close()
                raise
        self._model = self._shard.model
        self._sampler: Sampler | DeviceSampler = (
            Sampler(eos_token_ids) if device is None else DeviceSampler(triton_operations(), eos_token_ids)
        )

    def close(self) -> None:
        """Ends the other ranks. They also end with this process."""
        if self._followers is not None:
            self._followers.close()

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [] if self._followers is None else self._followers.pids

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that the model can take."""
        return self._model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._model.vocab_size

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers and ranks."""
        return self._shard.bytes_per_block * self._num_ranks

    @property
    def swap_bytes_per_s(self) -> float:
        """How fast blocks are copied between device and host memory, one way. Measured at the allocation."""
        if not self._shard.is_allocated:
            return 0.0
        # Ranks copy at the same time, each its part of a block.
        return self._shard.memory.swap_bytes_per_s * self._num_ranks

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the pools once; block ids are 0 … num_blocks - 1 and 0 … num_host_blocks - 1."""
        self._execute(InitializeKVCache(num_blocks, num_host_blocks))

    @property
    def kv_layout(self) -> KVLayout:
        """How its pools lie in memory."""
        config = self._model.config
        dtype = str(self._options.kv_dtype).removeprefix("torch.")
        arithmetic = "deterministic" if self.deterministic else "fast"
        return KVLayout(
            BLOCK_SIZE,
            dtype,
            self._num_ranks,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            arithmetic,
        )

    def kv_memory(self) -> tuple[Bytes, Bytes]:
        """Keys and values of one rank on the CPU, as bytes in one piece, in the pools' own memory."""
        cache = self._shard.memory.device
        keys, values = (pool.view(torch.uint8).numpy().reshape(-1) for pool in (cache.keys, cache.values))
        return keys, values

    def watch_layers(self, on_stored: Callable[[int], None] | None) -> None:
        """See `KVRunner`."""
        self._shard.on_stored = on_stored

    def free_kv_cache(self) -> None:
        """Gives the pools' memory back; `initialize_kv_cache` may then be called again, for another size."""
        self._execute(FreeKVCache())

    @property
    def device(self) -> torch.device:
        """Rank 0's."""
        return self._options.torch_device(0)

    @property
    def rank_bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers on one rank."""
        return self._shard.bytes_per_block

    def free_device_bytes(self) -> int:
        """What the fullest of the ranks' GPUs has free."""
        self._execute(MeasureMemory())
        return self._shard.free_device_bytes

    def record_graphs(self, max_num_seqs: int) -> None:
        """CUDA graphs of decodes of up to so many sequences; takes seconds. Steps of more, and those with
        prompts, are computed without. After `initialize_kv_cache`."""
        self._execute(RecordGraphs(decode_buckets(max_num_seqs)))

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        """Copies the blocks that are swapped, then runs the batch: one entry per scheduled sequence, the
        sampled id, or None where none was due.

        Raises ValueError naming the request whose scheduled tokens or blocks do not fit (before anything is
        computed), RuntimeError when the model's output is not finite, or another rank is gone.
        """
        step = self._prepare(batch.scheduled) if batch.scheduled else None
        logits = self._execute(RunStep(step, batch.swap_out, batch.swap_in))
        if logits is None:
            return RunnerOutput([])
        sampling = [sequence.request for sequence in batch.scheduled if sequence.samples]
        sampled = self._sampler.sample(logits, sampling)
        if len(sampling) == len(batch.scheduled):
            return RunnerOutput([*sampled.token_ids], sampled.logprobs)
        tokens, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        samples = [sequence.samples for sequence in batch.scheduled]
        return RunnerOutput(
            [next(tokens) if each else None for each in samples],
            [next(logprobs) if each else None for each in samples] if sampled.logprobs else [],
        )

    @torch.inference_mode()
    def compute_logits(self, scheduled: Sequence[ScheduledSequence]) -> Tensor:
        """Writes the KV of the scheduled tokens and returns the logits of the sequences that sample.

        Returns fp32 [sequences that sample, vocab_size], in the order of `scheduled`.
        """
        logits = self._execute(RunStep(self._prepare(scheduled)))
        assert logits is not None
        return logits.clone()

    def _prepare(self, scheduled: Sequence[ScheduledSequence]) -> ModelStep:
        limits = StepLimits(self.vocab_size, self._shard.memory.num_blocks, self.max_model_len)
        return prepare_step(scheduled, limits)

    def _execute(self, command: RankCommand) -> Tensor | None:
        """On all ranks. The next call overwrites the logits."""
        if self._followers is not None:
            self._followers.send(command)
        return self._shard.execute(command)


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def _check_ranks(options: ModelOptions, weights: DecoderWeights) -> None:
    """Before any process is started. Raises RanksError naming the setting."""
    plan_shard(options, weights, 0)
    if options.device == "cuda":
        if options.num_ranks > (gpus := torch.cuda.device_count()):
            raise RanksError(
                f"{SETTING} is {options.num_ranks}: at most one rank a GPU, and there are {gpus}"
            )
    elif options.num_ranks > (cores := num_cores()):
        raise RanksError(f"{SETTING} is {options.num_ranks}: at most one rank a core, and there are {cores}")
