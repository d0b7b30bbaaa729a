"""Likely tokens' logits computed anew, plain torch."""

from torch import Tensor

from kernels.rescore_logits import MARGIN, MAX_CANDIDATES, NUM_MARGINS
from kernels.rms_norm_ref import rms_norm_ref


def rescore_logits_ref(
    logits: Tensor, hidden: Tensor, norm_weight: Tensor, epsilon: float, values: Tensor, scales: Tensor
) -> None:
    """Replaces each row's logits at or above its largest - MARGIN by
    `rms_norm(hidden) * norm_weight @ (values * scales)`, in place.

    logits: fp32 [num_rows, vocab_size]; hidden: fp32 [num_rows, dim]; norm_weight: fp32 [dim]; values: int8
    [vocab_size, dim / 32, 32]; scales: fp32 [vocab_size, dim / 32, 1]. Where more than MAX_CANDIDATES are as
    near, the margin is halved, up to NUM_MARGINS margins in all; a row that is too flat for all of them stays
    as it is. So does each NaN or infinity, and a row whose largest logit is one. (The kernel may change other
    logits beside a NaN.)
    """
    normed = rms_norm_ref(hidden, norm_weight, epsilon)
    for row, x in zip(logits, normed, strict=True):
        largest = row.max()
        if not largest.isfinite():
            continue
        for halvings in range(NUM_MARGINS):
            candidates = (row >= largest - MARGIN / 2**halvings).nonzero().flatten()
            if len(candidates) <= MAX_CANDIDATES:
                row[candidates] = (values[candidates] * scales[candidates]).flatten(1) @ x
                break
