"""Gated activations of feed-forward layers on the GPU (Shazeer 2020): SwiGLU, and GEGLU in the tanh form."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import torch
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, cdiv, check_rows, kernel

_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """As `silu_and_mul_ref`. Raises ValueError where rows are not contiguous or have no two halves."""
    return _gated(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """As `gelu_and_mul_ref`. Raises ValueError where rows are not contiguous or have no two halves."""
    return _gated(x, gelu=True)


def _gated(x: Tensor, *, gelu: bool) -> Tensor:
    output = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device)
    launch(output, x, gelu=gelu).run()
    return output


def launch(output: Tensor, x: Tensor, *, gelu: bool) -> Launch:
    """What either runs: a program for each piece of each row."""
    check_rows("x", x)
    if x.shape[1] % 2:
        raise ValueError(f"x: a row has a gate and as many values; {x.shape[1]} is odd")
    dim = x.shape[1] // 2
    return Launch(
        _gated_activation,
        (len(x), cdiv(dim, _BLOCK)),
        {"output": output, "x": x, "x_stride": x.stride(0)},
        {"DIM": dim, "BLOCK": _BLOCK, "GELU": gelu},
        num_stages=1,
    )


@kernel
def _gated_activation(output, x, x_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < DIM
    element = output.dtype.element_ty
    gate = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + DIM + i, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x³).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    product = activated.to(element).to(tl.float32) * up
    tl.store(output + row * DIM + i, product.to(element), mask=mask)
