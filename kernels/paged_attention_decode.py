"""Attention of single tokens over a paged KV cache, which is read where it lies: nothing is gathered."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention_blocks import (
    LANES,
    add_values_1,
    add_values_2,
    add_values_4,
    join_output,
    score_keys_1,
    score_keys_2,
    score_keys_4,
    split_query,
)
from kernels.native import (
    bf16s,
    compiled,
    exp,
    float32_of_word,
    int64s,
    prefetch,
)
from kernels.team import Kernel, float_word

# Scores and values of one key for four heads of 256: measured 100 ns (Xeon, one thread, keys in memory).
_NS_PER_KEY_AND_VALUE = 0.1

# Keys, or values, that are on their way from memory while others are worked on. Pieces of 16 to 256 keys are
# equally fast (Xeon, heads of 256), so this one is well within a second-level cache.
_PIECE_KEYS = 128
_CACHE_LINE = 64

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def _score(
    group: int,
    query: int,
    keys: int,
    key_stride: int,
    num_keys: int,
    head_dim: int,
    scores: int,
    stride: int,
    ahead: int,
) -> None:
    """Scores of `group` heads over the keys of one block."""
    head = 0
    while group - head >= 4:
        score_keys_4(query, keys, key_stride, num_keys, head_dim, scores, stride, ahead)
        query += 16 * head_dim
        scores += 4 * stride
        head += 4
    if group - head >= 2:
        score_keys_2(query, keys, key_stride, num_keys, head_dim, scores, stride, ahead)
        query += 8 * head_dim
        scores += 2 * stride
        head += 2
    if group - head == 1:
        score_keys_1(query, keys, key_stride, num_keys, head_dim, scores, stride, ahead)


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
    ahead: int,
) -> None:
    """The weighted values of one block, for `group` heads."""
    head = 0
    while group - head >= 4:
        add_values_4(weights, stride, values, row_stride, num_keys, head_dim, out, ahead)
        weights += 4 * stride
        out += 16 * head_dim
        head += 4
    if group - head >= 2:
        add_values_2(weights, stride, values, row_stride, num_keys, head_dim, out, ahead)
        weights += 2 * stride
        out += 8 * head_dim
        head += 2
    if group - head == 1:
        add_values_1(weights, stride, values, row_stride, num_keys, head_dim, out, ahead)


@compiled
def _prefetch_rows(rows: int, row_stride: int, num_rows: int, row_bytes: int) -> None:
    for row in range(num_rows):
        for byte in range(0, row_bytes, _CACHE_LINE):
            prefetch(rows + row * row_stride + byte)


@compiled
def _weigh(scores: Any, maximum: Any, total: Any, sums: Any) -> Any:
    """Turns one head's scores into weights exp(score - maximum); the maximum and total of all keys so far.

    Where the maximum grows, the `sums` of earlier values shrink to it.
    """
    highest = maximum
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    if highest > maximum:
        factor = exp(maximum - highest)
        total *= factor
        for i in range(len(sums)):
            sums[i] *= factor
    for i in range(len(scores)):
        weight = exp(scores[i] - highest)
        scores[i] = weight
        total += weight
    return highest, total


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
    """The last token of one sequence; see `paged_attention_decode`. All but numbers are addresses.

    Keys are scored and values added in turns, a piece of the sequence at a time: while the keys of a piece
    are scored its values come from memory, and while its values are added the keys of the next piece do.
    """
    scale = float32_of_word(scale_word)
    oldest = max(0, seq_len - sliding_window) if sliding_window else 0
    group = num_heads // num_kv_heads
    first_block, num_blocks = oldest // block_size, (seq_len + block_size - 1) // block_size
    piece_blocks = max(1, _PIECE_KEYS // block_size)
    blocks = int64s(block_table, num_blocks)
    scores = np.empty((group, piece_blocks * block_size), np.float32)
    queries = np.empty((group, head_dim), np.float32)
    sums = np.empty((group, head_dim), np.float32)
    maxima = np.empty(group, np.float32)
    totals = np.empty(group, np.float32)
    stride = 4 * piece_blocks * block_size
    row_bytes = 2 * num_kv_heads * head_dim
    block_bytes = block_size * row_bytes
    for kv_head in range(num_kv_heads):
        keys = key_cache + 2 * kv_head * head_dim
        values = value_cache + 2 * kv_head * head_dim
        for block in range(first_block, min(first_block + piece_blocks, num_blocks)):
            _prefetch_rows(keys + blocks[block] * block_bytes, row_bytes, block_size, 2 * head_dim)
        first_head = kv_head * group
        for head in range(group):
            split_query(bf16s(query + 2 * (first_head + head) * head_dim, head_dim), scale, queries[head])
            maxima[head] = -np.inf
            totals[head] = _ZERO
            sums[head] = _ZERO
        for piece in range(first_block, num_blocks, piece_blocks):
            piece_end = min(piece + piece_blocks, num_blocks)
            num_keys = 0
            for block in range(piece, piece_end):
                place = blocks[block] * block_bytes
                first = max(oldest - block * block_size, 0)
                count = min(block_size, seq_len - block * block_size) - first
                _score(
                    group,
                    queries.ctypes.data,
                    keys + place + first * row_bytes,
                    row_bytes,
                    count,
                    head_dim,
                    scores.ctypes.data + 4 * num_keys,
                    stride,
                    values + place,
                )
                num_keys += count
            for head in range(group):
                maxima[head], totals[head] = _weigh(
                    scores[head, :num_keys], maxima[head], totals[head], sums[head]
                )
            key = 0
            for block in range(piece, piece_end):
                ahead = values + blocks[block] * block_bytes
                if block + piece_blocks < num_blocks:
                    ahead = keys + blocks[block + piece_blocks] * block_bytes
                first = max(oldest - block * block_size, 0)
                count = min(block_size, seq_len - block * block_size) - first
                _add(
                    group,
                    scores.ctypes.data + 4 * key,
                    stride,
                    values + blocks[block] * block_bytes + first * row_bytes,
                    row_bytes,
                    count,
                    head_dim,
                    sums.ctypes.data,
                    ahead,
                )
                key += count
        for head in range(group):
            result = bf16s(output + 2 * (first_head + head) * head_dim, head_dim)
            join_output(sums[head], _ONE / totals[head], result)


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
