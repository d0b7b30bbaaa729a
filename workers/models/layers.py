"""What every transformer of the catalogue is built from: weights as they lie in memory, and attention."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention_cpu import PagedAttentionPlan, paged_attention_cpu
from kernels.paged_attention_ref import paged_attention_ref
from kernels.reshape_and_cache_ref import reshape_and_cache_ref


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix without bias. weight: [out_features, in_features]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features], converted to the weight's dtype, which the result has too."""
        return F.linear(x.to(self.weight.dtype), self.weight)


@dataclass(frozen=True, slots=True)
class KVCache:
    """The block pool's memory. keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class Attention(Protocol):
    """Attention of one step over the paged KV cache, the same for every layer of the step."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        """Stores key and value, then attends with scale 1 (models scale the query).

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads, head_dim] in query's dtype.
        """


@dataclass(frozen=True, slots=True)
class BatchedAttention:
    """The fast way. plans: one for each sliding window that the model uses; slot_mapping: [num_tokens]."""

    cache: KVCache
    slot_mapping: Tensor
    plans: dict[int | None, PagedAttentionPlan]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        reshape_and_cache_ref(key, value, keys, values, self.slot_mapping)
        return paged_attention_cpu(query.to(keys.dtype), keys, values, self.plans[sliding_window], scale=1.0)


@dataclass(frozen=True, slots=True)
class TokenwiseAttention:
    """The batch-invariant way: every token is a sequence of its own with one query.

    What is computed for a token then has a shape that only its position gives, whatever is scheduled beside
    it and however its prompt was cut. The first `len(slot_mapping)` rows are tokens, the rest is padding.

    slot_mapping: [num_tokens]; block_tables: [num_tokens, max_blocks]; seq_lens: [num_tokens], position + 1.
    """

    cache: KVCache
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_tokens = len(self.slot_mapping)
        reshape_and_cache_ref(key[:num_tokens], value[:num_tokens], keys, values, self.slot_mapping)
        output = torch.zeros_like(query)
        output[:num_tokens] = paged_attention_ref(
            query[:num_tokens],
            keys,
            values,
            self.block_tables,
            self.seq_lens,
            torch.arange(num_tokens + 1),
            1.0,
            sliding_window,
        )
        return output
