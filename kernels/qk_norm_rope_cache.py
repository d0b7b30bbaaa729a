"""Query and key norms, rotation and the store into the KV cache, in one pass over each token."""

import numpy as np
import torch
from torch import Tensor

from kernels.activations import Activations
from kernels.add_rms_norm import inverse_rms, sum_of_squares
from kernels.native import bf16s, compiled, float32_of_word, floats, int64s, to_bf16, words_at
from kernels.quantize_rows import load_row
from kernels.team import Kernel, float_word

_NS_PER_ELEMENT = 1.0


@compiled
def qk_norm_rope_cache_range(
    start: int,
    end: int,
    num_tokens: int,
    qkv: int,
    qkv_scales: int,
    qkv_planes: int,
    qk_norm: int,
    cos_sin: int,
    positions: int,
    slot_mapping: int,
    key_cache: int,
    value_cache: int,
    epsilon_word: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query: int,
) -> None:
    """Tokens start … end - 1; see `qk_norm_rope_cache`."""
    epsilon = float32_of_word(epsilon_word)
    half = head_dim // 2
    width = (num_heads + 2 * num_kv_heads) * head_dim
    row = np.empty(width, np.float32)
    for index in range(start, end):
        load_row(row, index, num_tokens, qkv, qkv_scales, qkv_planes, 0, width)
        position = int64s(positions + 8 * index, 1)[0]
        slot = int64s(slot_mapping + 8 * index, 1)[0]
        cosines = floats(cos_sin + 4 * position * head_dim, half)
        sines = floats(cos_sin + 4 * position * head_dim + 4 * half, half)
        for head in range(num_heads + num_kv_heads):
            first = row[head * head_dim : head * head_dim + half]
            second = row[head * head_dim + half : (head + 1) * head_dim]
            factor = inverse_rms(sum_of_squares(first) + sum_of_squares(second), head_dim, epsilon)
            if head < num_heads:
                target = query + 2 * (index * num_heads + head) * head_dim
            else:
                target = key_cache + 2 * (slot * num_kv_heads + head - num_heads) * head_dim
            low, high = bf16s(target, half), bf16s(target + 2 * half, half)
            weights = qk_norm + 4 * head * head_dim
            low_weights, high_weights = floats(weights, half), floats(weights + 4 * half, half)
            for i in range(half):
                a = first[i] * factor * low_weights[i]
                b = second[i] * factor * high_weights[i]
                low[i] = to_bf16(a * cosines[i] - b * sines[i])
                high[i] = to_bf16(b * cosines[i] + a * sines[i])
        kv_dim = num_kv_heads * head_dim
        new = row[(num_heads + num_kv_heads) * head_dim :]
        stored = bf16s(value_cache + 2 * slot * kv_dim, kv_dim)
        for i in range(kv_dim):
            stored[i] = to_bf16(new[i])


def _rows(start: int, end: int, arguments: int) -> None:
    qk_norm_rope_cache_range(start, end, *words_at(arguments, 15))


_kernel = Kernel(_rows)


def qk_norm_rope_cache(
    qkv: Activations,
    qk_norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    epsilon: float,
) -> Tensor:
    """See `qk_norm_rope_cache_ref`. All tensors contiguous, qkv's values bf16.

    Positions and slots are not checked here: it would cost more than the rest.
    """
    num_tokens = len(positions)
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_heads = len(qk_norm) - num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.bfloat16)
    _kernel(
        num_tokens,
        qkv.values.shape[1] * _NS_PER_ELEMENT,
        (
            num_tokens,
            qkv.values.data_ptr(),
            qkv.scales.data_ptr(),
            qkv.code,
            qk_norm.data_ptr(),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            float_word(epsilon),
            num_heads,
            num_kv_heads,
            head_dim,
            query.data_ptr(),
        ),
    )
    return query
