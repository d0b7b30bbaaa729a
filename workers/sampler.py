"""Picks the next tokens from logits: greedy, temperature, top-k, top-p.

Random numbers are counter-based: a pure function of (seed, position), where position is the number of output
tokens so far. So a resumed request draws what the lost run would have drawn, and a row never depends on
the rows beside it. One number a row is enough: the token is found by inverting the cumulative distribution.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from schemas.records import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# The cumulative sum over a vocabulary is taken over sums of this many weights, then inside one of them.
_CHUNK = 512
# Top-p looks at this many of the largest first, then at eight times as many: a full sort of 262,144 logits
# takes 20 ms, and a nucleus is rarely larger.
_NUCLEUS_CANDIDATES = 256
# Below it sampling is greedy: fp32 could not divide by it.
_LOWEST_TEMPERATURE = 1e-5


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014, figure 1, with Stafford's mix 13)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1): draw `position` of the SplitMix64 generator that starts at a hash of `seed`.

    The seed is hashed first, or neighbouring seeds would share shifted sequences. Any integers are taken,
    modulo 2⁶⁴.
    """
    state = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    drawn = _mix((state + (position + 1) * _GOLDEN_GAMMA) & _MASK)
    return ((drawn >> 11) + 0.5) * 2.0**-53


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token id for each row.

    logits: fp32 [num_rows, vocab_size]; -inf excludes a token. positions: output tokens so far, by row.
    Temperature 0 (or below 1e-5) is greedy: the lowest id among equals. top_k 0 or above the vocabulary is
    off, top_p 1 is off; top-p applies to what top-k left. Values outside their range are for who takes
    requests to refuse; here they mean the nearest sensible thing, for a step has many requests in it.

    Raises RuntimeError when a row has NaN or +inf, or nothing but -inf: the model's output is broken.
    """
    if not len(logits) == len(params) == len(positions):
        raise ValueError(f"{len(logits)} rows, {len(params)} params, {len(positions)} positions")
    if not len(logits):
        return []
    maxima, greedy = logits.max(dim=-1)
    finite = torch.isfinite(maxima)
    if not finite.all():
        rows = (~finite).nonzero().flatten().tolist()
        raise RuntimeError(f"logits are not finite in rows {rows}: the model's output is broken")
    tokens: list[int] = greedy.tolist()
    for row, (row_params, position) in enumerate(zip(params, positions, strict=True)):
        if row_params.temperature >= _LOWEST_TEMPERATURE:
            # One row at a time: a vectorized exp may round differently where threads split a larger
            # tensor, and then rows would depend on their mates.
            scaled = (logits[row] - maxima[row]).div_(row_params.temperature)
            tokens[row] = _sample_row(scaled, row_params, uniform(row_params.seed, position))
    return tokens


def _sample_row(scaled: Tensor, params: SamplingParams, threshold: float) -> int:
    """scaled: [vocab_size] with maximum 0; threshold: in (0, 1)."""
    if 0 < params.top_k < len(scaled):
        values, token_ids = scaled.topk(params.top_k)
        weights = values.exp().to(torch.float64)
        if params.top_p < 1:
            weights = _nucleus(weights, params.top_p * weights.sum().item())
    elif params.top_p < 1:
        weights, token_ids = _largest(scaled, params.top_p)
    else:
        return _invert_chunked(scaled.exp_(), threshold)
    return int(token_ids[_invert(weights, threshold)])


def _largest(scaled: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The weights of the nucleus in descending order, and their token ids."""
    needed = top_p * scaled.exp().sum(dtype=torch.float64).item()
    size = _NUCLEUS_CANDIDATES
    while True:
        size = min(size, len(scaled))
        values, token_ids = scaled.topk(size)
        weights = values.exp().to(torch.float64)
        if size == len(scaled) or weights.sum().item() >= needed:
            nucleus = _nucleus(weights, needed)
            return nucleus, token_ids[: len(nucleus)]
        size *= 8


def _nucleus(weights: Tensor, needed: float) -> Tensor:
    """The fewest of the descending weights whose sum reaches `needed`; at least one."""
    count = int(torch.searchsorted(weights.cumsum(0), needed)) + 1
    return weights[:count]


def _invert(weights: Tensor, threshold: float) -> int:
    """The index where the cumulative distribution of fp64 weights [n] passes `threshold` in (0, 1)."""
    cumulative = weights.cumsum(0)
    index = torch.searchsorted(cumulative, threshold * cumulative[-1].item(), right=True)
    return min(int(index), len(weights) - 1)


def _invert_chunked(weights: Tensor, threshold: float) -> int:
    """As `_invert` for fp32 weights of a whole vocabulary, without a cumulative sum over all of it."""
    if len(weights) % _CHUNK:
        weights = F.pad(weights, (0, -len(weights) % _CHUNK))
    chunks = weights.view(-1, _CHUNK)
    cumulative = chunks.sum(dim=1).to(torch.float64).cumsum(0)
    target = threshold * cumulative[-1].item()
    chunk = min(int(torch.searchsorted(cumulative, target, right=True)), len(chunks) - 1)
    before = cumulative[chunk - 1].item() if chunk else 0.0
    inside = chunks[chunk].to(torch.float64).cumsum(0)
    index = int(torch.searchsorted(inside, target - before, right=True))
    if index == _CHUNK:  # the sums differ in their last bits: the last token of the chunk that has a weight
        index = int(chunks[chunk].nonzero()[-1])
    return chunk * _CHUNK + index
