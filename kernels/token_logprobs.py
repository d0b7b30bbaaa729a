"""Log probabilities of the most likely tokens, without sorting the row or writing its softmax."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.logit_cuts import largest
from kernels.logit_rows import (
    CHUNK,
    LOWEST_KEY,
    chunk_maxima,
    doubles,
    index_in,
    key_in,
    mass_of,
    row_at,
    value_of,
)
from kernels.native import exact, int64s
from kernels.team import Kernel

# As in kernels.sampling: maximum, weights and the largest few.
_NS_PER_LOGIT = 0.3

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def top_logprobs(logits: Tensor, rows: Ints, count: int) -> tuple[Floats, Ints, Floats]:
    """For each of `rows` [n] of fp32 logits [num_rows, vocab_size]: contiguous, no NaN or +inf, not all -inf.

    Returns the normalizer log Σ exp(logit) [n]; the ids [n, count] of the most likely tokens, best first, of
    equals the lowest id first; and their natural log probabilities [n, count]. `count` is at most vocab_size.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    normalizers = np.empty(num_rows, np.float64)
    token_ids = np.empty((num_rows, count), np.int64)
    logprobs = np.empty((num_rows, count), np.float64)
    arrays = (rows, normalizers, token_ids, logprobs)
    _kernel(
        num_rows,
        vocab_size * _NS_PER_LOGIT,
        (vocab_size, logits.data_ptr(), count, *(array.ctypes.data for array in arrays)),
    )
    return normalizers, token_ids, logprobs


def _rows(start: int, end: int, arguments: int) -> None:
    words = int64s(arguments, 7)
    count = words[2]
    for i in range(start, end):
        row = int64s(words[3], end)[i]
        mine = slice(i * count, (i + 1) * count)
        token_ids = int64s(words[5], end * count)[mine]
        logprobs = doubles(words[6], end * count)[mine]
        doubles(words[4], end)[i] = _top_of_row(row_at(words[1], row, words[0]), token_ids, logprobs)


@exact
def _top_of_row(logits: Any, token_ids: Any, logprobs: Any) -> Any:
    bits = logits.view(np.int32)
    maxima = np.empty(-(-len(logits) // CHUNK), np.int32)
    lowest, highest = chunk_maxima(bits, maxima)
    top = value_of(highest)
    weights = np.empty(CHUNK, np.float32)
    everything = np.int64(LOWEST_KEY)
    mass = mass_of(logits, bits, maxima, top, np.float32(1.0), everything, np.int64(len(logits)), weights)
    normalizer = np.float64(top) + math.log(mass)
    if len(token_ids):
        packed = largest(bits, maxima, lowest, highest, len(token_ids))
        for j in range(len(token_ids)):
            best = packed[len(packed) - 1 - j]
            token_ids[j] = index_in(best)
            logprobs[j] = np.float64(value_of(key_in(best))) - normalizer
    return normalizer


_kernel = Kernel(_rows)
