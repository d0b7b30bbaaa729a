"""Quantization of each row by its own scale, plain torch."""

import torch
from torch import Tensor

from kernels.activations import PLANE_RATIO, ZERO_POINT, Activations, Format
from kernels.rotate_rows_ref import rotate_rows_ref


def quantize_rows_ref(x: Tensor, form: Format) -> Activations:
    """Rows as a matrix product takes them; quantized ones have their largest value at 127.

    x: fp32 or bf16 [num_rows, dim]. A row of zeros has scale 0.
    """
    x = x.to(torch.float32)
    if form not in (Format.BF16, Format.FP32, Format.INT8_PAIR):
        x = rotate_rows_ref(x)
    if form.dtype is not torch.uint8:
        return Activations(x.to(form.dtype), torch.ones(len(x)))
    maxima = x.abs().amax(dim=-1)
    scaled = x * torch.where(maxima > 0, 127.0 / maxima, 0.0)[:, None]
    planes = [scaled.round()]
    if form.planes == 2:
        planes.append(((scaled - planes[0]) * PLANE_RATIO).round())
    return Activations((torch.cat(planes) + ZERO_POINT).to(torch.uint8), maxima / 127.0)
