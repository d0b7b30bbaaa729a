"""Root mean square layer normalization on the GPU, alone and together with the addition before it."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import torch
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, check_rows, kernel, next_power_of_2

# A row lies in registers: at 1,024 threads that is 64 for each.
MAX_DIM = 65_536


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `rms_norm_ref`. Raises ValueError where a row is not contiguous or is longer than MAX_DIM."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(output, x, None, weight, epsilon).run()
    return output


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `fused_add_rms_norm_ref`: adds x to residual in place, returns the norm of the sum."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(output, x, residual, weight, epsilon).run()
    return output


def launch(output: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Launch:
    """What either runs: a program for each row."""
    dim = x.shape[-1]
    check_rows("x", x)
    if dim > MAX_DIM:
        raise ValueError(f"x has rows of {dim} values, at most {MAX_DIM} are supported")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous and of x's shape {tuple(x.shape)}")
    if weight.shape[-1] != dim or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous rows of {dim} values, its shape is {tuple(weight.shape)}"
        )
    num_weights = weight.numel() // dim
    # [num_tokens, num_heads, head_dim] may be a part of [num_tokens, more heads, head_dim].
    inner = x.shape[-2] if x.dim() > 2 else 1
    if x.dim() > 3 and not x.is_contiguous():
        raise ValueError("x of more than three dimensions must be contiguous")
    outer_stride = x.stride(-3) if x.dim() == 3 else x.stride(0) if x.dim() == 2 else inner * dim
    padded = next_power_of_2(dim)
    return Launch(
        _rms_norm,
        (x.numel() // dim,),
        {
            "output": output,
            "x": x,
            "residual": residual,
            "weight": weight,
            "outer_stride": outer_stride,
            "inner_stride": x.stride(-2) if x.dim() > 1 else 0,
            "epsilon": epsilon,
        },
        {"DIM": dim, "DIM_PADDED": padded, "INNER": inner, "NUM_WEIGHTS": num_weights},
        num_warps=min(32, max(1, padded // 512)),
        num_stages=1,
    )


@kernel
def _rms_norm(
    output,
    x,
    residual,
    weight,
    outer_stride,
    inner_stride,
    epsilon,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    INNER: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, DIM_PADDED)
    mask = i < DIM
    place = row // INNER * outer_stride + row % INNER * inner_stride + i
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * DIM + i, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * DIM + i, rounded, mask=mask)
        values = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / DIM + epsilon)
    factors = tl.load(weight + row % NUM_WEIGHTS * DIM + i, mask=mask, other=0.0)
    normed = values * factor * factors.to(tl.float32)
    tl.store(output + row * DIM + i, normed.to(output.dtype.element_ty), mask=mask)
