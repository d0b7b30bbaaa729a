"""One rank's part of a model: its weights and its KV pool. A model in one process is the only rank's.

Ranks do the same things in the same order: what `RankCommand` holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.dispatch import check_cache_dtype, has_fp8, triton_operations
from workers.batched_forward import BatchedForward
from workers.block_pool import BLOCK_SIZE
from workers.device_forward import DeviceForward
from workers.device_memory import free_device_bytes
from workers.exact_forward import ExactForward
from workers.kv_memory import KVMemory
from workers.model_step import ModelStep
from workers.models.decoder import Decoder
from workers.models.decoder_config import Architecture
from workers.models.decoder_weights import DecoderWeights
from workers.models.device_decoder import DeviceDecoder
from workers.models.gemma_fast import FastGemmaModel, gemma_shapes
from workers.models.linear_choice import choose_linears
from workers.models.ranks import Ranks
from workers.models.sharding import Sharding, shard

_Forward = ExactForward | BatchedForward | FastGemmaModel | DeviceForward


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What is loaded, and how it computes: see `TorchModelRunner`."""

    weights_path: Path
    max_model_len: int | None
    deterministic: bool
    num_threads: int | None
    linear: str
    num_ranks: int
    device: str | None = None
    """Where Triton's kernels compute: cuda (rank r has the GPU r), or cpu for Triton's interpreter, which is
    for tests. None: the CPU, by what is made for it."""
    fp8_kv: bool = False

    @property
    def dtype(self) -> torch.dtype:
        # The interpreter's bf16 is wrong.
        return torch.float32 if self.deterministic or self.device == "cpu" else torch.bfloat16

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8_kv else self.dtype

    def torch_device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank) if self.device == "cuda" else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InitializeKVCache:
    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class FreeKVCache:
    pass


@dataclass(frozen=True, slots=True)
class RunStep:
    """A `SchedulerOutput` without what only rank 0 knows: blocks to copy, then tokens to compute, if any."""

    step: ModelStep | None
    swap_out: Sequence[tuple[int, int]] = field(default_factory=list)
    swap_in: Sequence[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordGraphs:
    """CUDA graphs of decodes; `buckets` are numbers of sequences. After the KV cache's allocation."""

    buckets: Sequence[int]


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """What the fullest of the ranks' GPUs has free."""


RankCommand = InitializeKVCache | FreeKVCache | RunStep | RecordGraphs | MeasureMemory


class ModelShard:
    """Not thread-safe. With several ranks `join` comes before anything is executed."""

    def __init__(self, options: ModelOptions, weights: DecoderWeights, rank: int) -> None:
        """Loads the weights, which takes seconds.

        Raises ValueError for what cannot be served, RuntimeError when the machine's matrix library cannot
        keep the promise of deterministic mode.
        """
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._kv_dtype = options.kv_dtype
        self._device = options.torch_device(rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            check_cache_dtype(self._kv_dtype, self._device)
        self.free_device_bytes = 0
        """As of the last `MeasureMemory`."""
        self._sharding = plan_shard(options, weights, rank)
        with torch.inference_mode():
            self._forward, self.model = _load(options, weights, self._sharding)
        self._memory: KVMemory | None = None
        self.on_stored: Callable[[int], None] | None = None
        """See `KVCache`; for the steps to come."""

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers on this rank."""
        config = self.model.config
        elements = 2 * config.num_layers * BLOCK_SIZE * self._sharding.num_kv_heads * config.head_dim
        return elements * self._kv_dtype.itemsize

    @property
    def memory(self) -> KVMemory:
        """Raises RuntimeError before the allocation."""
        if self._memory is None:
            raise RuntimeError("initialize_kv_cache was not called")
        return self._memory

    @property
    def is_allocated(self) -> bool:
        return self._memory is not None

    def join(self, ranks: Ranks) -> None:
        """Computes with these ranks from now on."""
        assert isinstance(self.model, Decoder | DeviceDecoder)
        self.model.ranks = ranks

    def execute(self, command: RankCommand) -> Tensor | None:
        """Does what all ranks do; fp32 logits of the rows that sample where tokens were computed."""
        match command:
            case InitializeKVCache(num_blocks, num_host_blocks):
                self._allocate(num_blocks, num_host_blocks)
            case FreeKVCache():
                if isinstance(self._forward, DeviceForward):
                    self._forward.drop_graphs()
                self._memory = None
            case RecordGraphs(buckets):
                assert isinstance(self._forward, DeviceForward)
                with torch.inference_mode():
                    self._forward.record_graphs(self.memory.device, buckets)
            case MeasureMemory():
                assert isinstance(self.model, DeviceDecoder)
                self.free_device_bytes = self.model.ranks.least(free_device_bytes(self._device))
            case RunStep(step, swap_out, swap_in):
                if swap_out or swap_in:
                    self.memory.swap(swap_out, swap_in)
                if step is not None:
                    cache = self.memory.device
                    if self.on_stored is not None:
                        cache = replace(cache, on_stored=self.on_stored)
                    with torch.inference_mode():
                        return self._forward.compute_logits(step, cache)
        return None

    def _allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        if self._memory is not None:
            raise RuntimeError("the KV cache is allocated already")
        config = self.model.config
        self._memory = KVMemory(
            num_blocks,
            num_host_blocks,
            num_layers=config.num_layers,
            block_shape=(BLOCK_SIZE, self._sharding.num_kv_heads, config.head_dim),
            dtype=self._kv_dtype,
            device=self._device,
        )


def plan_shard(options: ModelOptions, weights: DecoderWeights, rank: int) -> Sharding:
    """Raises ValueError naming the setting for a number of ranks that does not go with the model."""
    return shard(weights.config, options.num_ranks, rank, exact=options.deterministic)


def _load(
    options: ModelOptions, weights: DecoderWeights, sharding: Sharding
) -> tuple[_Forward, Decoder | FastGemmaModel | DeviceDecoder]:
    """What computes logits, and the model that it does it with."""
    if options.device is not None:
        device = options.torch_device(sharding.rank)
        on_device = DeviceDecoder(
            weights,
            device,
            options.dtype,
            triton_operations(),
            sharding,
            options.max_model_len,
            keep_fp8=has_fp8(device),
        )
        return DeviceForward(on_device), on_device
    gemma = weights.config.architecture is Architecture.GEMMA3
    if gemma and not options.deterministic and options.num_ranks == 1:
        choice = choose_linears(options.linear, gemma_shapes(weights), weights.path.parent)
        fast_gemma = FastGemmaModel(weights, choice, options.max_model_len)
        return fast_gemma, fast_gemma
    model = Decoder(weights, options.max_model_len, options.dtype, sharding)
    return ExactForward(model) if options.deterministic else BatchedForward(model), model
