"""What lies between two matrices of a transformer's residual stream, plain torch."""

from torch import Tensor

from kernels.activations import Activations, Format
from kernels.quantize_rows_ref import quantize_rows_ref
from kernels.rms_norm_ref import rms_norm_ref


def add_rms_norm_ref(
    hidden: Tensor,
    branch: Activations | None,
    branch_weight: Tensor,
    weight: Tensor,
    epsilon: float,
    form: Format,
) -> Activations:
    """Adds `rms_norm(branch) * branch_weight` to hidden in place; returns `rms_norm(hidden) * weight`.

    hidden: fp32 [num_rows, dim]; branch: what a matrix gave, [num_rows, dim], or None to add nothing;
    weights: fp32 [dim]; form: of the result.
    """
    if branch is not None:
        hidden += rms_norm_ref(branch.dequantize(), branch_weight, epsilon)
    return quantize_rows_ref(rms_norm_ref(hidden, weight, epsilon), form)
