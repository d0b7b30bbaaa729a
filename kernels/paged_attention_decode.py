"""Attention of single tokens over a paged KV cache, which is read where it lies: nothing is gathered."""

import numpy as np
import torch
from torch import Tensor

from kernels.attention_blocks import (
    LANES,
    add_values_1,
    add_values_2,
    add_values_4,
    score_keys_1,
    score_keys_2,
    score_keys_4,
)
from kernels.native import (
    bf16s,
    compiled,
    exp,
    float32_of_word,
    from_bf16,
    int64s,
    to_bf16,
)
from kernels.team import Kernel, float_word

# Scores and values of one key for four heads of 256: measured 90 ns (Xeon, one thread, keys in memory).
_NS_PER_KEY_AND_VALUE = 0.1

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def _score(
    group: int, query: int, keys: int, key_stride: int, num_keys: int, head_dim: int, scores: int, stride: int
) -> None:
    """Scores of `group` heads over the keys of one block."""
    head = 0
    while group - head >= 4:
        score_keys_4(query, keys, key_stride, num_keys, head_dim, scores, stride)
        query += 16 * head_dim
        scores += 4 * stride
        head += 4
    if group - head >= 2:
        score_keys_2(query, keys, key_stride, num_keys, head_dim, scores, stride)
        query += 8 * head_dim
        scores += 2 * stride
        head += 2
    if group - head == 1:
        score_keys_1(query, keys, key_stride, num_keys, head_dim, scores, stride)


@compiled
def _add(
    group: int,
    weights: int,
    stride: int,
    values: int,
    row_stride: int,
    num_keys: int,
    head_dim: int,
    out: int,
) -> None:
    """The weighted values of one block, for `group` heads."""
    head = 0
    while group - head >= 4:
        add_values_4(weights, stride, values, row_stride, num_keys, head_dim, out)
        weights += 4 * stride
        out += 16 * head_dim
        head += 4
    if group - head >= 2:
        add_values_2(weights, stride, values, row_stride, num_keys, head_dim, out)
        weights += 2 * stride
        out += 8 * head_dim
        head += 2
    if group - head == 1:
        add_values_1(weights, stride, values, row_stride, num_keys, head_dim, out)


@compiled
def attend_sequence(
    query: int,
    key_cache: int,
    value_cache: int,
    block_table: int,
    seq_len: int,
    scale_word: int,
    sliding_window: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    output: int,
) -> None:
    """The last token of one sequence; see `paged_attention_decode`. All but numbers are addresses."""
    scale = float32_of_word(scale_word)
    oldest = max(0, seq_len - sliding_window) if sliding_window else 0
    num_keys = seq_len - oldest
    group = num_heads // num_kv_heads
    blocks = int64s(block_table, (seq_len + block_size - 1) // block_size)
    scores = np.empty((group, num_keys), np.float32)
    queries = np.empty((group, head_dim), np.float32)
    sums = np.empty((group, head_dim), np.float32)
    stride = 4 * num_keys
    row_bytes = 2 * num_kv_heads * head_dim
    for kv_head in range(num_kv_heads):
        given = bf16s(query + 2 * kv_head * group * head_dim, group * head_dim)
        for head in range(group):
            for i in range(head_dim):
                queries[head, i] = from_bf16(given[head * head_dim + i]) * scale
                sums[head, i] = _ZERO
        key = oldest
        while key < seq_len:
            count = min(block_size - key % block_size, seq_len - key)
            place = (blocks[key // block_size] * block_size + key % block_size) * row_bytes
            place += 2 * kv_head * head_dim
            _score(
                group,
                queries.ctypes.data,
                key_cache + place,
                row_bytes,
                count,
                head_dim,
                scores.ctypes.data + 4 * (key - oldest),
                stride,
            )
            key += count
        for head in range(group):
            row = scores[head]
            maximum = row[0]
            for i in range(num_keys):
                maximum = max(maximum, row[i])
            total = _ZERO
            for i in range(num_keys):
                weight = exp(row[i] - maximum)
                row[i] = weight
                total += weight
            factor = _ONE / total
            for i in range(num_keys):
                row[i] *= factor
        key = oldest
        while key < seq_len:
            count = min(block_size - key % block_size, seq_len - key)
            place = (blocks[key // block_size] * block_size + key % block_size) * row_bytes
            place += 2 * kv_head * head_dim
            _add(
                group,
                scores.ctypes.data + 4 * (key - oldest),
                stride,
                value_cache + place,
                row_bytes,
                count,
                head_dim,
                sums.ctypes.data,
            )
            key += count
        result = bf16s(output + 2 * kv_head * group * head_dim, group * head_dim)
        for head in range(group):
            for i in range(head_dim):
                result[head * head_dim + i] = to_bf16(sums[head, i])


def _rows(start: int, end: int, arguments: int) -> None:
    words = int64s(arguments, 14)
    rows = int64s(words[0], end)
    table_starts = int64s(words[5], end)
    seq_lens = int64s(words[6], end)
    head_bytes = 2 * words[9] * words[11]
    for index in range(start, end):
        attend_sequence(
            words[1] + rows[index] * head_bytes,
            words[2],
            words[3],
            words[4] + 8 * table_starts[index],
            seq_lens[index],
            words[7],
            words[8],
            words[9],
            words[10],
            words[11],
            words[12],
            words[13] + rows[index] * head_bytes,
        )


_kernel = Kernel(_rows)


def supports_decode(query: Tensor, key_cache: Tensor) -> bool:
    """Whether `paged_attention_decode` takes these: bf16, and heads that fill vectors."""
    return query.dtype == key_cache.dtype == torch.bfloat16 and query.shape[2] % LANES == 0


def paged_attention_decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: Tensor,
    block_tables: Tensor,
    table_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> None:
    """Attention of query rows that are the last tokens of their sequences; see `paged_attention_ref`.

    output, query: bf16 [num_tokens, num_heads, head_dim], of which `rows` are read and written; key_cache,
    value_cache: bf16 [num_blocks, block_size, num_kv_heads, head_dim]; rows, table_starts, seq_lens: int64
    [num_seqs]; block_tables: int64, the tables of all sequences, that of sequence i from table_starts[i] on.
    Block ids are not checked here. All tensors contiguous.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_seqs = len(rows)
    longest = int(seq_lens.max()) if num_seqs else 0
    if sliding_window is not None:
        longest = min(longest, sliding_window)
    _kernel(
        num_seqs,
        longest * num_heads * head_dim * _NS_PER_KEY_AND_VALUE + 1000,
        (
            rows.data_ptr(),
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            block_tables.data_ptr(),
            table_starts.data_ptr(),
            seq_lens.data_ptr(),
            float_word(scale),
            sliding_window or 0,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            output.data_ptr(),
        ),
    )
