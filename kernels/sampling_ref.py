"""The plain way to do what `kernels.sampling` does: sort, drop the tail, invert the cumulative sum."""

import torch
from torch import Tensor

from kernels.sampling import BROKEN, LOWEST_TEMPERATURE


def sample_rows_ref(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """As `sample_rows`. logits: [num_rows, vocab_size], the others [num_rows]; int64 [num_rows]."""
    tokens = [
        _sample_row(logits[row], float(temperature[row]), kept, float(uniform[row]))
        for row, kept in enumerate(kept_ref(logits, temperature, top_k, top_p, min_p))
    ]
    return torch.tensor(tokens, dtype=torch.int64)


def kept_ref(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> list[Tensor]:
    """For each row a bool [vocab_size]: which tokens may be drawn."""
    return [
        _kept_row(row, float(temperature[i]), int(top_k[i]), float(top_p[i]), float(min_p[i]))
        for i, row in enumerate(logits)
    ]


def probabilities_ref(logits: Tensor, temperature: float) -> Tensor:
    """fp64 softmax of one row [vocab_size] at a temperature."""
    return (logits.double() / temperature).softmax(0)


def _kept_row(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    order = logits.argsort(descending=True, stable=True)
    kept = torch.zeros(len(logits), dtype=torch.bool)
    if not temperature >= LOWEST_TEMPERATURE:
        kept[order[0]] = True
        return kept
    probabilities = probabilities_ref(logits, temperature)[order]
    count = top_k if 0 < top_k < len(logits) else len(logits)
    if top_p < 1:
        mass = probabilities[:count].cumsum(0)
        count = int((mass < top_p * mass[-1]).sum()) + 1
    if min_p > 0:
        count = min(count, int((probabilities >= min(min_p, 1.0) * probabilities[0]).sum()))
    kept[order[:count]] = True
    return kept & (logits > -torch.inf)


def _sample_row(logits: Tensor, temperature: float, kept: Tensor, uniform: float) -> int:
    top = logits.max()
    if not torch.isfinite(top):
        return BROKEN
    if not temperature >= LOWEST_TEMPERATURE:
        return int(logits.argmax())
    cumulative = (probabilities_ref(logits, temperature) * kept).cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
