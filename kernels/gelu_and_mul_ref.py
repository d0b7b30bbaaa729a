"""Gated activation of Gemma's feed-forward layers (Shazeer 2020, GEGLU with the tanh form), plain torch."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul_ref(x: Tensor) -> Tensor:
    """`gelu_tanh(gate) * up` in x's dtype: each of the two is computed in fp32 and rounded once.

    x: [num_tokens, 2 * dim], gate in the first half, up in the second. Returns [num_tokens, dim].
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
