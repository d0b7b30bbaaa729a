"""Changes logits in place before sampling: biases, penalties, grammar masks.

Logits are fp32 [num_rows, vocab_size], contiguous, on the CPU; a token is forbidden by a logit of -inf.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.logit_rows import row_at
from kernels.native import exact, int64s
from kernels.team import Kernel

_NS_PER_MASKED_LOGIT = 0.2

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


def add_bias(logits: Tensor, rows: Ints, token_ids: Ints, biases: Floats) -> None:
    """Adds biases[i] to the logit of token_ids[i] in rows[i], all [n].

    Raises IndexError for a token beyond the vocabulary: compiled code would write past the row.
    """
    _add_bias(logits.numpy(), rows, token_ids, biases)


def apply_penalties(
    logits: Tensor,
    rows: Ints,
    offsets: Ints,
    token_ids: Int32s,
    counts: Int32s,
    repetition: Floats,
    frequency: Floats,
    presence: Floats,
) -> None:
    """Penalizes tokens that were there already.

    Entries offsets[i] to offsets[i + 1] - 1 of `token_ids` (without doubles) and `counts` are of rows[i].
    rows, repetition, frequency, presence: [n]; offsets: [n + 1]. A count says how often the output holds the
    token; 0: only the prompt does.

    Repetition divides a positive logit and multiplies a negative one (Keskar et al. 2019, CTRL, section 4.1,
    with the sign as in Hugging Face's processor). Then frequency × count and, once for any count, presence
    are taken off, as OpenAI's API defines them. Raises IndexError for a token beyond the vocabulary.
    """
    _apply_penalties(logits.numpy(), rows, offsets, token_ids, counts, repetition, frequency, presence)


def apply_bitmask(logits: Tensor, rows: Ints, bitmask: Int32s) -> None:
    """Forbids in rows[i] each token whose bit `token_id % 32` of bitmask[i, token_id // 32] is clear.

    rows: [n]; bitmask: [n, ceil(vocab_size / 32)], contiguous.
    """
    vocab_size, words = logits.shape[1], bitmask.shape[1]
    if words * 32 < vocab_size:
        raise ValueError(f"a bitmask of {words} words for {vocab_size} tokens")
    _bitmask_kernel(
        len(rows),
        vocab_size * _NS_PER_MASKED_LOGIT,
        (vocab_size, logits.data_ptr(), words, rows.ctypes.data, bitmask.ctypes.data),
    )


@exact
def _add_bias(logits: Any, rows: Any, token_ids: Any, biases: Any) -> None:
    for i in range(len(rows)):
        if not 0 <= token_ids[i] < logits.shape[1]:
            raise IndexError("a biased token is not in the vocabulary")
        logits[rows[i], token_ids[i]] += np.float32(biases[i])


@exact
def _apply_penalties(
    logits: Any,
    rows: Any,
    offsets: Any,
    token_ids: Any,
    counts: Any,
    repetition: Any,
    frequency: Any,
    presence: Any,
) -> None:
    for i in range(len(rows)):
        row = logits[rows[i]]
        for j in range(offsets[i], offsets[i + 1]):
            if not 0 <= token_ids[j] < len(row):
                raise IndexError("a penalized token is not in the vocabulary")
            logit = np.float64(row[token_ids[j]])
            logit = logit / repetition[i] if logit > 0.0 else logit * repetition[i]
            if counts[j] > 0:
                logit -= frequency[i] * counts[j] + presence[i]
            row[token_ids[j]] = np.float32(logit)


def _bitmask_rows(start: int, end: int, arguments: int) -> None:
    words = int64s(arguments, 5)
    for i in range(start, end):
        row = int64s(words[3], end)[i]
        mask = row_at(words[4], i, words[2]).view(np.int32)
        _mask_row(row_at(words[1], row, words[0]), mask)


@exact
def _mask_row(logits: Any, mask: Any) -> None:
    for word in range(-(-len(logits) // 32)):
        bits = mask[word]
        span = logits[word * 32 : word * 32 + 32]
        for bit in range(len(span)):
            allowed = (bits >> np.int32(bit)) & np.int32(1)
            span[bit] = span[bit] if allowed else np.float32(-np.inf)


_bitmask_kernel = Kernel(_bitmask_rows)
