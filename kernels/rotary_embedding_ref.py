"""Rotary position embedding (Su et al. 2021), halves rotated against each other, plain torch."""

import torch
from torch import Tensor


def rotary_frequencies(base: float, head_dim: int) -> Tensor:
    """Radians a position, of each pair of elements: fp32, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / base**exponents


def cos_sin_cache(base: float, head_dim: int, max_positions: int) -> Tensor:
    """`cos_sin_table` of the frequencies that are not scaled."""
    return cos_sin_table(rotary_frequencies(base, head_dim), max_positions)


def cos_sin_table(frequencies: Tensor, max_positions: int) -> Tensor:
    """Cosines and sines of every position: fp32, [max_positions, 2, head_dim / 2].

    frequencies: as of `rotary_frequencies`. Looked up, not computed in each step: a position has the same
    bits in every batch.
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotary_embedding_ref(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates every head of every token by the token's position, in fp32, returned in x's dtype.

    x: [num_tokens, num_heads, head_dim]; cos_sin: [num_tokens, 2, head_dim / 2], rows of `cos_sin_cache`.
    """
    cos, sin = cos_sin.unsqueeze(2).unbind(1)  # [num_tokens, 1, head_dim / 2]
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
