"""Quantization of each row by its own scale, plain torch."""

import torch
from torch import Tensor

from kernels.activations import ZERO_POINT, Activations
from kernels.rotate_rows_ref import rotate_rows_ref


def quantize_rows_ref(x: Tensor, dtype: torch.dtype) -> Activations:
    """Rows as a matrix product takes them: bf16 with scale 1, or rotated and then uint8 with their maximum
    at 127.

    x: fp32 or bf16 [num_rows, dim]; dtype: uint8, bf16 or fp32. A row of zeros has scale 0.
    """
    x = x.to(torch.float32)
    if dtype is not torch.uint8:
        return Activations(x.to(dtype), torch.ones(len(x)))
    x = rotate_rows_ref(x)
    maxima = x.abs().amax(dim=-1)
    factors = torch.where(maxima > 0, 127.0 / maxima, 0.0)
    values = (x * factors[:, None]).round() + ZERO_POINT
    return Activations(values.to(torch.uint8), maxima / 127.0)
