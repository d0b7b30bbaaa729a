"""Whether tokens were drawn from the distribution that a request asks for, worked out without our code."""

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor


def distribution(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """fp64 [vocab_size] of one row of logits: the softmax of what the filters keep, top-p of what top-k
    leaves."""
    expected = (logits.double() / temperature).softmax(0)
    order = expected.argsort(descending=True)
    dropped = expected < min_p * float(expected.max())
    if top_k:
        expected[order[top_k:]] = 0
        expected /= expected.sum()
    if top_p < 1:
        before = expected[order].cumsum(0) - expected[order]
        expected[order[before >= top_p]] = 0
    expected[dropped] = 0
    return expected / expected.sum()


def assert_drawn_from(expected: Tensor, tokens: Sequence[int]) -> None:
    """Chi-square at p = 0.001, over the tokens that come five times or more and all others together."""
    draws, counts = len(tokens), Counter(tokens)
    assert all(expected[token] > 0 for token in counts)
    statistic, bins = 0.0, 0
    rare_expected = rare_count = 0.0
    for token, probability in enumerate(expected.tolist()):
        if probability * draws < 5:
            rare_expected += probability * draws
            rare_count += counts[token]
        else:
            statistic += (counts[token] - probability * draws) ** 2 / (probability * draws)
            bins += 1
    if rare_expected > 5:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        bins += 1
    degrees = bins - 1
    assert degrees >= 3
    # Wilson and Hilferty: chi-square's quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (statistic, limit)
