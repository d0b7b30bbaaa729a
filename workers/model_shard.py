"""One rank's part of a model: its weights and its KV pool. A model in one process is the only rank's.

Ranks do the same things in the same order: what `RankCommand` holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workers.batched_forward import BatchedForward
from workers.block_pool import BLOCK_SIZE
from workers.exact_forward import ExactForward
from workers.kv_memory import KVMemory
from workers.model_step import ModelStep
from workers.models.decoder import Decoder
from workers.models.decoder_config import Architecture
from workers.models.decoder_weights import DecoderWeights
from workers.models.gemma_fast import FastGemmaModel, gemma_shapes
from workers.models.linear_choice import choose_linears
from workers.models.ranks import Ranks
from workers.models.sharding import Sharding, shard


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What is loaded, and how it computes: see `TorchModelRunner`."""

    weights_path: Path
    max_model_len: int | None
    deterministic: bool
    num_threads: int | None
    linear: str
    num_ranks: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.deterministic else torch.bfloat16


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


RankCommand = InitializeKVCache | FreeKVCache | RunStep


class ModelShard:
    """Not thread-safe. With several ranks `join` comes before anything is executed."""

    def __init__(self, options: ModelOptions, weights: DecoderWeights, rank: int) -> None:
        """Loads the weights, which takes seconds.

        Raises ValueError for what cannot be served, RuntimeError when the machine's matrix library cannot
        keep the promise of deterministic mode.
        """
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._dtype = options.dtype
        self._sharding = plan_shard(options, weights, rank)
        with torch.inference_mode():
            self._forward, self.model = _load(options, weights, self._sharding)
        self._memory: KVMemory | None = None

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers on this rank."""
        config = self.model.config
        elements = 2 * config.num_layers * BLOCK_SIZE * self._sharding.num_kv_heads * config.head_dim
        return elements * self._dtype.itemsize

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
        assert isinstance(self.model, Decoder)
        self.model.ranks = ranks

    def execute(self, command: RankCommand) -> Tensor | None:
        """Does what all ranks do; fp32 logits of the rows that sample where tokens were computed."""
        match command:
            case InitializeKVCache(num_blocks, num_host_blocks):
                self._allocate(num_blocks, num_host_blocks)
            case FreeKVCache():
                self._memory = None
            case RunStep(step, swap_out, swap_in):
                if swap_out or swap_in:
                    self.memory.swap(swap_out, swap_in)
                if step is not None:
                    with torch.inference_mode():
                        return self._forward.compute_logits(step, self.memory.device)
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
            dtype=self._dtype,
        )


def plan_shard(options: ModelOptions, weights: DecoderWeights, rank: int) -> Sharding:
    """Raises ValueError naming the setting for a number of ranks that does not go with the model."""
    return shard(weights.config, options.num_ranks, rank, exact=options.deterministic)


def _load(
    options: ModelOptions, weights: DecoderWeights, sharding: Sharding
) -> tuple[ExactForward | BatchedForward | FastGemmaModel, Decoder | FastGemmaModel]:
    """What computes logits, and the model that it does it with."""
    gemma = weights.config.architecture is Architecture.GEMMA3
    if gemma and not options.deterministic and options.num_ranks == 1:
        choice = choose_linears(options.linear, gemma_shapes(weights), weights.path.parent)
        fast_gemma = FastGemmaModel(weights, choice, options.max_model_len)
        return fast_gemma, fast_gemma
    model = Decoder(weights, options.max_model_len, options.dtype, sharding)
    return ExactForward(model) if options.deterministic else BatchedForward(model), model
