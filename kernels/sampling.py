"""Draws one token for each row of logits: temperature, top-k, top-p, min-p, without sorting the row.

A filter keeps a prefix of the row in descending order (among equals the lower index comes first), so what it
keeps is said by where the prefix ends: a cut. The token is found by inverting the cumulative distribution of
what is kept, in order of index.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.logit_cuts import mass_cut, rank_cut
from kernels.logit_rows import (
    CHUNK,
    MINUS_INF_KEY,
    PLUS_INF_KEY,
    chunk_maxima,
    doubles,
    fill_weights,
    first_of,
    key_of_value,
    row_at,
    sum_of,
    value_of,
)
from kernels.native import exact, int64s, words_at
from kernels.team import Kernel

BROKEN = -1
"""In place of a token id: the row holds NaN or +inf, or nothing but -inf."""

# Below it sampling is greedy: fp32 could not divide by it. Above the other all tokens are as likely.
LOWEST_TEMPERATURE = 1e-5
_HIGHEST_TEMPERATURE = 1e30

# Measured on a Xeon at 262,144 tokens: 30 µs to find the maximum, 200 µs to draw.
_NS_PER_LOGIT = 0.15

Floats = npt.NDArray[np.float64]


def sample_rows(
    logits: Tensor,
    temperature: Floats,
    top_k: npt.NDArray[np.int64],
    top_p: Floats,
    min_p: Floats,
    uniform: Floats,
) -> npt.NDArray[np.int64]:
    """One token id for each row, or BROKEN.

    logits: fp32 [num_rows, vocab_size], contiguous; -inf excludes a token. The others: [num_rows]. A
    temperature below 1e-5 is greedy (the lowest id among equals). top_k 0 or above the vocabulary is off, so
    are top_p 1 and min_p 0. Each filter looks at what those before it left, in that order. `uniform` is in
    (0, 1). Values outside their range mean the nearest sensible thing: a step has many requests in it.
    """
    num_rows, vocab_size = logits.shape
    tokens = np.empty(num_rows, np.int64)
    arrays = (temperature, top_k, top_p, min_p, uniform, tokens)
    _kernel(
        num_rows,
        vocab_size * _NS_PER_LOGIT,
        (vocab_size, logits.data_ptr(), *(array.ctypes.data for array in arrays)),
    )
    return tokens


def _rows(start: int, end: int, arguments: int) -> None:
    _sample_range(start, end, *words_at(arguments, 8))


@exact
def _sample_range(
    start: Any,
    end: Any,
    vocab_size: Any,
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    uniform: Any,
    tokens: Any,
) -> None:
    for row in range(start, end):
        row_logits = row_at(logits, row, vocab_size)
        int64s(tokens, end)[row] = _sample_row(
            row_logits,
            row_logits.view(np.int32),
            doubles(temperature, end)[row],
            int64s(top_k, end)[row],
            doubles(top_p, end)[row],
            doubles(min_p, end)[row],
            doubles(uniform, end)[row],
        )


@exact
def _sample_row(
    logits: Any, bits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any
) -> Any:
    size = len(logits)
    maxima = np.empty(-(-size // CHUNK), np.int32)
    lowest, highest = chunk_maxima(bits, maxima)
    if lowest < MINUS_INF_KEY or highest >= PLUS_INF_KEY or highest == MINUS_INF_KEY:
        return BROKEN
    if not temperature >= LOWEST_TEMPERATURE or top_k == 1:
        return first_of(bits, maxima, highest)
    top = value_of(highest)
    temperature = min(temperature, _HIGHEST_TEMPERATURE)
    inverse = np.float32(1.0 / temperature)
    weights = np.empty(CHUNK, np.float32)
    key, last = np.int64(MINUS_INF_KEY), np.int64(size)
    if 0 < top_k < size:
        key, last = rank_cut(bits, maxima, lowest, highest, top_k)
    if top_p < 1.0:
        key, last = mass_cut(logits, bits, maxima, highest, temperature, inverse, top_p, key, last, weights)
    if min_p > 0.0:
        least = np.int64(key_of_value(top + temperature * math.log(min(min_p, 1.0))))
        if least > key:
            key, last = least, np.int64(size)
    return _invert(logits, bits, maxima, top, inverse, key, last, uniform, weights)


@exact
def _invert(
    logits: Any,
    bits: Any,
    maxima: Any,
    top: Any,
    inverse: Any,
    key: Any,
    last: Any,
    uniform: Any,
    weights: Any,
) -> Any:
    """The index where the cumulative weight of what the cut keeps passes `uniform` of its total."""
    cumulative = np.empty(len(maxima), np.float64)
    total = 0.0
    for c in range(len(maxima)):
        if maxima[c] >= key:
            fill_weights(logits, bits, c, top, inverse, key, last, weights)
            total += sum_of(weights)
        cumulative[c] = total
    target = uniform * total
    c = 0
    while cumulative[c] <= target and cumulative[c] < total:
        c += 1
    fill_weights(logits, bits, c, top, inverse, key, last, weights)
    passed = cumulative[c - 1] if c else 0.0
    chosen = -1
    for i in range(CHUNK):
        if weights[i] > 0.0:
            chosen = c * CHUNK + i
            passed += np.float64(weights[i])
            # The two sums differ in their last bits: past the end it is the last token with a weight.
            if passed > target:
                break
    return chosen


_kernel = Kernel(_rows)
