"""How long a step will take, learned from the steps that were."""

from collections.abc import Iterable
from math import sqrt

# A step that is n steps old counts FORGET ** n: half as much after 69 steps.
_FORGET = 0.99
# (tokens/s)². Below it a feature was not seen for thousands of steps: what is known of it is kept as it is.
_FORGOTTEN = 1e-6
_MISS_WEIGHT = 0.1
# A step that takes so many times more or less than predicted says nothing about the next one.
_ODD = 2.0
# A step may be at most this many times as large as any that was seen lately: where nothing is known of
# larger ones, a prediction is a guess.
_GROWTH = 2.0
_FIRST_SEQS = 2
_FIRST_TOKENS = 64
_SEEN_DECAY = 0.999
# Sweeps: two where a chunk tells of all coefficients.
_TWICE, _ONCE = (1, 2), (1,)


def num_attended_pairs(num_computed_tokens: int, num_further: int) -> int:
    """(token, token it looks at) of the `num_further` tokens that a prompt chunk has beyond its first."""
    return num_further * (num_computed_tokens + 1) + num_further * (num_further + 1) // 2


class StepTimeModel:
    """seconds ≈ base + per_seq · sequences + per_token · further tokens + per_context · context tokens
               + per_pair · attended pairs.

    A sequence comes with its first token; "further tokens" are those of prompt chunks beyond it. Context
    tokens are all whose KV is read: the sum of the sequences' lengths. Attended pairs are those of further
    tokens (`num_attended_pairs`): a chunk late in a long prompt takes longer than the first one.

    Least squares of the relative error, with forgetting, coefficients not below 0, by sweeps of coordinate
    descent in each step. Relative, so that short and long steps count alike, and so that a step in which the
    machine stood still for a second weighs next to nothing.

    A step is not really linear (it takes the longer one of reading the weights and of computing). What the
    line misses near the batches of late is made up for by a running mean of real by predicted time, one for
    steps with prompt chunks and one for steps without.
    """

    __slots__ = (
        "_a",
        "_b",
        "_miss",
        "_seen_seqs",
        "_seen_tokens",
        "base",
        "per_context",
        "per_pair",
        "per_seq",
        "per_token",
    )

    def __init__(self) -> None:
        self.base = 0.0
        self.per_seq = 0.0
        self.per_token = 0.0
        self.per_context = 0.0
        self.per_pair = 0.0
        # Normal equations: the upper triangle of Σ x xᵀ row by row, and Σ x, where x are features / seconds.
        self._a = [0.0] * 15
        self._b = [0.0] * 5
        self._miss = [1.0, 1.0]
        self._seen_seqs = 0.0
        self._seen_tokens = 0.0

    @property
    def max_num_seqs(self) -> int:
        """Sequences up to which a prediction is worth something."""
        return int(_GROWTH * max(self._seen_seqs, _FIRST_SEQS / _GROWTH))

    @property
    def max_num_tokens(self) -> int:
        """Further tokens up to which a prediction is worth something."""
        return int(_GROWTH * max(self._seen_tokens, _FIRST_TOKENS / _GROWTH))

    def predict(self, num_seqs: int, num_tokens: int, num_context_tokens: int, num_pairs: int = 0) -> float:
        """Seconds of a step with so many sequences, further tokens, context tokens and attended pairs."""
        line = self.line(num_seqs, num_tokens, num_context_tokens, num_pairs)
        return line * self._miss[num_tokens > 0]

    def line(self, num_seqs: int, num_tokens: int, num_context_tokens: int, num_pairs: int = 0) -> float:
        """The linear part of a prediction."""
        return (
            self.base
            + self.per_seq * num_seqs
            + self.per_token * num_tokens
            + self.per_context * num_context_tokens
            + self.per_pair * num_pairs
        )

    def line_for(self, seconds: float, has_chunks: bool) -> float:
        """What the linear part may come to in a step of `seconds`, with prompt chunks or without."""
        return seconds / self._miss[has_chunks]

    def num_further_in(self, line_s: float, num_computed_tokens: int) -> int:
        """Further tokens of a chunk behind `num_computed_tokens` that the linear part takes `line_s` for, as
        far as a prediction is worth something."""
        # a x² + b x = line_s, in the form that divides by nothing small.
        a = self.per_pair / 2
        b = self.per_token + self.per_context + self.per_pair * (num_computed_tokens + 1.5)
        divisor = b + sqrt(b * b + 4 * a * line_s)
        most = self.max_num_tokens
        return most if 2 * line_s >= most * divisor else int(2 * line_s / divisor)

    def observe(
        self, num_seqs: int, num_tokens: int, num_context_tokens: int, seconds: float, num_pairs: int = 0
    ) -> None:
        """Learns from a step that took `seconds`."""
        self.observe_steps(num_seqs, num_tokens, ((num_context_tokens, seconds),), num_pairs)

    def observe_steps(
        self, num_seqs: int, num_tokens: int, steps: Iterable[tuple[int, float]], num_pairs: int = 0
    ) -> None:
        """Learns from steps of one size that followed one another: (context tokens, seconds) of each."""
        a00, a01, a02, a03, a04, a11, a12, a13, a14, a22, a23, a24, a33, a34, a44 = self._a
        b0, b1, b2, b3, b4 = self._b
        t0, t1, t2, t3, t4 = self.base, self.per_seq, self.per_token, self.per_context, self.per_pair
        seen_seqs, seen_tokens = self._seen_seqs, self._seen_tokens
        has_chunks = num_tokens > 0
        miss, f = self._miss[has_chunks], _FORGET
        sweeps = _TWICE if has_chunks else _ONCE
        for num_context_tokens, seconds in steps:
            seen_seqs *= _SEEN_DECAY
            if seen_seqs < num_seqs:
                seen_seqs = num_seqs
            seen_tokens *= _SEEN_DECAY
            if seen_tokens < num_tokens:
                seen_tokens = num_tokens
            line = t0 + t1 * num_seqs + t2 * num_tokens + t3 * num_context_tokens + t4 * num_pairs
            if line / _ODD < seconds < line * _ODD:
                miss += _MISS_WEIGHT * (seconds / line - miss)
            x0 = 1.0 / (seconds if seconds > 1e-6 else 1e-6)
            x1, x3 = num_seqs * x0, num_context_tokens * x0
            a00 = a00 * f + x0 * x0
            a01 = a01 * f + x0 * x1
            a03 = a03 * f + x0 * x3
            a11 = a11 * f + x1 * x1
            a13 = a13 * f + x1 * x3
            a33 = a33 * f + x3 * x3
            b0 = b0 * f + x0
            b1 = b1 * f + x1
            b3 = b3 * f + x3
            a02 *= f
            a04 *= f
            a12 *= f
            a14 *= f
            a22 *= f
            a23 *= f
            a24 *= f
            a34 *= f
            a44 *= f
            b2 *= f
            b4 *= f
            if has_chunks:
                x2, x4 = num_tokens * x0, num_pairs * x0
                a02 += x0 * x2
                a12 += x1 * x2
                a22 += x2 * x2
                a23 += x2 * x3
                b2 += x2
                a04 += x0 * x4
                a14 += x1 * x4
                a24 += x2 * x4
                a34 += x3 * x4
                a44 += x4 * x4
                b4 += x4
            for _ in sweeps:
                # A step without chunks says nothing of them.
                if has_chunks:
                    if a22 > _FORGOTTEN:
                        t2 = (b2 - a02 * t0 - a12 * t1 - a23 * t3 - a24 * t4) / a22
                        t2 = t2 if t2 > 0.0 else 0.0  # a third of max()'s time
                    if a44 > _FORGOTTEN:
                        t4 = (b4 - a04 * t0 - a14 * t1 - a24 * t2 - a34 * t3) / a44
                        t4 = t4 if t4 > 0.0 else 0.0
                t1 = (b1 - a01 * t0 - a12 * t2 - a13 * t3 - a14 * t4) / a11
                t1 = t1 if t1 > 0.0 else 0.0
                t3 = (b3 - a03 * t0 - a13 * t1 - a23 * t2 - a34 * t4) / a33
                t3 = t3 if t3 > 0.0 else 0.0
                t0 = (b0 - a01 * t1 - a02 * t2 - a03 * t3 - a04 * t4) / a00
                t0 = t0 if t0 > 0.0 else 0.0
        self._a = [a00, a01, a02, a03, a04, a11, a12, a13, a14, a22, a23, a24, a33, a34, a44]
        self._b = [b0, b1, b2, b3, b4]
        self.base, self.per_seq, self.per_token, self.per_context, self.per_pair = t0, t1, t2, t3, t4
        self._seen_seqs, self._seen_tokens = seen_seqs, seen_tokens
        self._miss[has_chunks] = miss
