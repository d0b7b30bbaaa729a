"""Computes the logits of likely tokens anew, exactly, where a quantized output matrix gave all of them.

The quantized product is off by some hundredths, which is enough to swap two tokens that are near each other
and for nothing else. The few that could be the most likely one are few rows of a table: their products with
the hidden state cost microseconds. As long as no logit is off by half of MARGIN, the largest logit is then
that of the most likely token.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.add_rms_norm import inverse_rms, sum_of_squares
from kernels.logit_rows import CHUNK, LOWEST_KEY, MINUS_INF_KEY, PLUS_INF_KEY, key_of, key_of_value, value_of
from kernels.native import compiled, float32_of_word, floats, int32s, int64s, prefetch, signed_bytes, words_at
from kernels.team import Kernel, float_word

MARGIN = 2.0
"""Logits so far below their row's largest, or less, are computed anew. Twice as much changed no most
likely token of the test texts, and took a tenth off the divergence, for four times the candidates."""
MAX_CANDIDATES = 128
"""Of a row. Where more are as near, the margin is halved until so few are. On texts there were 3 in the mean
and 34 at most (Gemma 3 270M, 2,390 rows)."""
NUM_MARGINS = 8
"""How many margins are tried. A row that is too flat for the last, MARGIN / 128, stays as it is."""

TABLE_BLOCK = 32
"""Values of the table with one scale."""

# Chunks of a row whose maxima one claim finds: 16,384 values.
_SEGMENT = 32
_GROUP = 64  # values of a chunk that are passed over together
_CACHE_LINE = 64
# A Xeon with AMX, 2 virtual cores: 0.1 ns for a logit in the cache; 3 µs for a row's few candidates.
_NS_PER_LOGIT = 0.1
_NS_PER_ROW = 3000.0

_LOWEST_KEY = np.int32(LOWEST_KEY)
_HALF = np.float32(0.5)


@compiled
def _maxima_range(start: int, end: int, logits: int, vocab_size: int, maxima: int) -> None:
    """Segments start … end - 1 of all rows: the largest key of each chunk."""
    num_chunks = -(-vocab_size // CHUNK)
    num_segments = -(-num_chunks // _SEGMENT)
    for segment in range(start, end):
        row, place = segment // num_segments, segment % num_segments
        row_bits = int32s(logits + 4 * row * vocab_size, vocab_size)
        row_maxima = int32s(maxima + 4 * row * num_chunks, num_chunks)
        for c in range(place * _SEGMENT, min((place + 1) * _SEGMENT, num_chunks)):
            chunk = row_bits[c * CHUNK : (c + 1) * CHUNK]
            highest = _LOWEST_KEY
            for i in range(len(chunk)):
                highest = max(highest, key_of(chunk[i]))
            row_maxima[c] = highest


@compiled
def _gather(bits: Any, maxima: Any, least: Any, found: Any) -> int:
    """Writes the indices of all keys at or above `least` to `found`; returns their number, or one more than
    there is room for."""
    count = 0
    for c in range(len(maxima)):
        if maxima[c] >= least:
            for start in range(c * CHUNK, min((c + 1) * CHUNK, len(bits)), _GROUP):
                group = bits[start : start + _GROUP]
                highest = _LOWEST_KEY
                for i in range(len(group)):
                    highest = max(highest, key_of(group[i]))
                if highest < least:
                    continue
                for i in range(len(group)):
                    if key_of(group[i]) >= least:
                        if count == len(found):
                            return count + 1
                        found[count] = start + i
                        count += 1
    return count


@compiled
def _dot(x: Any, values: Any, scales: Any, row: Any) -> Any:
    """The product of x, fp32 [dim], and a row of the table, which is written out to `row`."""
    for block in range(len(scales)):
        for i in range(block * TABLE_BLOCK, (block + 1) * TABLE_BLOCK):
            row[i] = np.float32(values[i]) * scales[block]
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * row[i]
    return total


@compiled
def _prefetch_range(address: int, num_bytes: int) -> None:
    first = address - address % _CACHE_LINE
    for line in range(first, address + num_bytes, _CACHE_LINE):
        prefetch(line)


@compiled
def _rescore_range(
    start: int,
    end: int,
    logits: int,
    vocab_size: int,
    maxima: int,
    hidden: int,
    dim: int,
    norm_weight: int,
    epsilon_word: int,
    values: int,
    scales: int,
) -> None:
    """Rows start … end - 1."""
    num_chunks, num_blocks = -(-vocab_size // CHUNK), dim // TABLE_BLOCK
    epsilon = float32_of_word(epsilon_word)
    weight = floats(norm_weight, dim)
    x, dequantized = np.empty(dim, np.float32), np.empty(dim, np.float32)
    found = np.empty(MAX_CANDIDATES, np.int64)
    for index in range(start, end):
        row_maxima = int32s(maxima + 4 * index * num_chunks, num_chunks)
        highest = _LOWEST_KEY
        for c in range(num_chunks):
            highest = max(highest, row_maxima[c])
        if highest <= MINUS_INF_KEY or highest >= PLUS_INF_KEY:
            continue
        bits = int32s(logits + 4 * index * vocab_size, vocab_size)
        margin, count = np.float32(MARGIN), MAX_CANDIDATES + 1
        for _ in range(NUM_MARGINS):
            count = _gather(bits, row_maxima, key_of_value(value_of(highest) - margin), found)
            if count <= MAX_CANDIDATES:
                break
            margin *= _HALF
        if count > MAX_CANDIDATES:
            continue
        for j in range(count):
            _prefetch_range(values + found[j] * dim, dim)
            _prefetch_range(scales + 4 * found[j] * num_blocks, 4 * num_blocks)
        row = floats(hidden + 4 * index * dim, dim)
        factor = inverse_rms(sum_of_squares(row), dim, epsilon)
        for i in range(dim):
            x[i] = row[i] * factor * weight[i]
        row_logits = floats(logits + 4 * index * vocab_size, vocab_size)
        for j in range(count):
            token = found[j]
            row_logits[token] = _dot(
                x,
                signed_bytes(values + token * dim, dim),
                floats(scales + 4 * token * num_blocks, num_blocks),
                dequantized,
            )


def _maxima_rows(start: int, end: int, arguments: int) -> None:
    words = int64s(arguments, 3)
    _maxima_range(start, end, words[0], words[1], words[2])


def _rescore_rows(start: int, end: int, arguments: int) -> None:
    _rescore_range(start, end, *words_at(arguments, 9))


_maxima_kernel = Kernel(_maxima_rows)
_rescore_kernel = Kernel(_rescore_rows)


def rescore_logits(
    logits: Tensor, hidden: Tensor, norm_weight: Tensor, epsilon: float, values: Tensor, scales: Tensor
) -> None:
    """See `rescore_logits_ref`. All tensors contiguous."""
    num_rows, vocab_size = logits.shape
    dim = hidden.shape[1]
    num_chunks = -(-vocab_size // CHUNK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.int32)
    shared = logits.data_ptr(), vocab_size, maxima.data_ptr()
    segment_ns = _SEGMENT * CHUNK * _NS_PER_LOGIT
    _maxima_kernel(num_rows * -(-num_chunks // _SEGMENT), segment_ns, shared)
    _rescore_kernel(
        num_rows,
        _NS_PER_ROW,
        (
            *shared,
            hidden.data_ptr(),
            dim,
            norm_weight.data_ptr(),
            float_word(epsilon),
            values.data_ptr(),
            scales.data_ptr(),
        ),
    )
