"""From the product of the query-key-value matrix to queries and a filled KV cache, plain torch."""

import torch
from torch import Tensor

from kernels.activations import Activations
from kernels.reshape_and_cache_ref import reshape_and_cache_ref
from kernels.rms_norm_ref import rms_norm_ref
from kernels.rotary_embedding_ref import rotary_embedding_ref


def qk_norm_rope_cache_ref(
    qkv: Activations,
    qk_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    epsilon: float,
) -> Tensor:
    """Norms and rotates queries and keys, stores keys and values; returns the queries.

    qkv: [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]; qk_norm: fp32 [num_heads + num_kv_heads,
    head_dim]; cos_sin: fp32 [max_positions, 2, head_dim / 2]; positions, slot_mapping: int64 [num_tokens];
    caches: bf16 [num_blocks, block_size, num_kv_heads, head_dim], changed in place at the slots.
    Returns bf16 [num_tokens, num_heads, head_dim].
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.dequantize().view(len(positions), -1, head_dim)
    qk, value = heads[:, : len(qk_norm)], heads[:, len(qk_norm) :]
    qk = rotary_embedding_ref(rms_norm_ref(qk, qk_norm, epsilon), cos_sin[positions])
    query, key = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
    reshape_and_cache_ref(key, value, key_cache, value_cache, slot_mapping)
    return query.to(torch.bfloat16)
