"""What lies between two matrices of a transformer's residual stream, plain torch."""

import torch
from torch import Tensor

from kernels.activations import Activations
from kernels.quantize_rows_ref import quantize_rows_ref
from kernels.rms_norm_ref import rms_norm_ref


def add_rms_norm_ref(
    hidden: Tensor,
    branch: Activations | None,
    branch_weight: Tensor,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Activations:
    """Adds `rms_norm(branch) * branch_weight` to hidden in place; returns `rms_norm(hidden) * weight`.

    hidden: fp32 [num_rows, dim]; branch: what a matrix gave, [num_rows, dim], or None to add nothing;
    weights: fp32 [dim]; dtype: of the result, uint8 (quantized by row), bf16 or fp32.
    """
    if branch is not None:
        hidden += rms_norm_ref(branch.dequantize(), branch_weight, epsilon)
    return quantize_rows_ref(rms_norm_ref(hidden, weight, epsilon), dtype)
