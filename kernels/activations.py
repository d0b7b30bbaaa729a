"""What a matrix product takes and gives: rows of numbers, each row with a scale of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO_POINT = 128


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows that a matrix is multiplied with, or that came out of it. Row i stands for `row * scales[i]`.

    values: uint8 with zero point 128, bf16 or fp32, [num_rows, dim]; scales: fp32 [num_rows]. Rows of floats
    that were not quantized have scale 1. What is linear commutes with the scale: the product of quantized
    rows keeps theirs.
    """

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [num_rows, dim]."""
        values = self.values.to(torch.float32)
        if self.values.dtype is torch.uint8:
            values = values - ZERO_POINT
        return values * self.scales[:, None]


def empty_activations(num_rows: int, dim: int, dtype: torch.dtype) -> Activations:
    """For a kernel to fill. `dtype`: uint8, bf16 or fp32."""
    return Activations(torch.empty(num_rows, dim, dtype=dtype), torch.empty(num_rows))
