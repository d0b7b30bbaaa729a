"""What every transformer of the catalogue is built from: weights as they lie in memory, and attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention_ref import paged_attention_ref
from kernels.reshape_and_cache_ref import reshape_and_cache_ref


class Linear:
    """A matrix without bias, kept in the layout that oneDNN multiplies fastest where there is oneDNN.

    Without packing oneDNN reorders a bf16 matrix in every call: the output matrix of 262,144 × 640 takes
    41 ms with 1 row and 68 with 32, packed 16 and 21 (Xeon with AMX, 2 threads).
    """

    def __init__(self, weight: Tensor, typical_rows: int = 1) -> None:
        """weight: [out_features, in_features]; packed for inputs of `typical_rows`, right for any."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._packed = can_pack(weight.dtype)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, typical_rows)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features], converted to the weight's dtype, which the result has too."""
        x = x.to(self.dtype)
        if not self._packed:
            return F.linear(x, self._weight)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return result


def can_pack(dtype: torch.dtype) -> bool:
    """Whether a `Linear` of this dtype has memory of its own, in another layout than its weight."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class KVCache:
    """The block pool's memory. keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim].

    `on_stored` is told each layer, in order, when it holds the KV of all the step's tokens, by models that
    compute a layer for all of them at once; others do not call it.
    """

    keys: Tensor
    values: Tensor
    on_stored: Callable[[int], None] | None = None


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
class TokenwiseAttention:
    """The batch-invariant way: what is computed for a token has a shape that only its position gives.

    The first `len(slot_mapping)` rows are tokens, the rest is padding. `pieces` are query heads and the KV
    heads that they attend to, each computed by itself. The other fields are the arguments of
    `paged_attention_ref` for these rows.
    """

    cache: KVCache
    pieces: Sequence[tuple[slice, slice]]
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_tokens = len(self.slot_mapping)
        reshape_and_cache_ref(key[:num_tokens], value[:num_tokens], keys, values, self.slot_mapping)
        output = torch.zeros_like(query)
        for heads, kv_heads in self.pieces:
            output[:num_tokens, heads] = paged_attention_ref(
                query[:num_tokens, heads],
                keys[:, :, kv_heads],
                values[:, :, kv_heads],
                self.block_tables,
                self.seq_lens,
                self.query_start_loc,
                1.0,
                sliding_window,
            )
        return output
