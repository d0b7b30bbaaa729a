"""Root mean square layer normalization (Zhang and Sennrich 2019, section 3), plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension, in fp32, returned in x's dtype.

    x: [..., dim]; weight: fp32, [dim], or [n, dim] with one weight for each of the last-but-one dimension.
    """
    normed = F.rms_norm(x.to(torch.float32), x.shape[-1:], None, epsilon)
    return normed.mul_(weight).to(x.dtype)


def fused_add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Adds x to residual in place; returns `rms_norm(residual)`, of the sum as rounded, in x's dtype.

    x, residual: [..., dim]; weight as for `rms_norm_ref`.
    """
    residual.copy_(residual.to(torch.float32) + x.to(torch.float32))
    return rms_norm_ref(residual, weight, epsilon).to(x.dtype)
