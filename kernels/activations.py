"""What a matrix product takes and gives: rows of numbers, each row with a scale of its own."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

ZERO_POINT = 128
# What one step of the first plane is cut into by the second: its rounding error, ±1/2, becomes ±127.
PLANE_RATIO = 254
# Rows of memory behind those that kernels of ours multiply, which these may read, and do not use.
SLACK_ROWS = 32


class Format(IntEnum):
    """How rows are written for a matrix.

    Rotated ones (see `rotate_rows_ref`) are for matrices that are rotated too. Pairs have two planes: what
    the first loses to rounding is in the second, so a row is exact to 16 bits, for one more product.
    """

    BF16 = 0
    ROTATED_BF16 = 1
    ROTATED_INT8 = 2
    ROTATED_INT8_PAIR = 3
    FP32 = 4
    INT8_PAIR = 5

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return _DTYPES[self]

    @property
    def planes(self) -> int:
        """How many rows of values stand for one."""
        return 2 if self in (Format.INT8_PAIR, Format.ROTATED_INT8_PAIR) else 1


_DTYPES = {
    Format.BF16: torch.bfloat16,
    Format.ROTATED_BF16: torch.bfloat16,
    Format.ROTATED_INT8: torch.uint8,
    Format.ROTATED_INT8_PAIR: torch.uint8,
    Format.FP32: torch.float32,
    Format.INT8_PAIR: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows that a matrix is multiplied with, or that came out of it. Row i stands for `row * scales[i]`.

    values: uint8 with zero point 128, bf16 or fp32, [planes * num_rows, dim]; scales: fp32 [num_rows]. With
    two planes a row is the sum of values[i] and values[num_rows + i] / 254. Rows of floats that were not
    quantized have scale 1. What is linear commutes with scales and planes: a product of such rows has the
    same.
    """

    values: Tensor
    scales: Tensor

    @property
    def num_rows(self) -> int:
        return self.scales.shape[0]

    @property
    def planes(self) -> int:
        """1 or 2: how many rows of values stand for one."""
        return self.values.shape[0] // self.scales.shape[0] if self.scales.shape[0] else 1

    @property
    def code(self) -> int:
        """How kernels read a product: 0 for fp32 without scales, else the number of bf16 planes."""
        return 0 if self.values.dtype is torch.float32 else self.planes

    def dequantize(self) -> Tensor:
        """fp32 [num_rows, dim]."""
        values = self.values.to(torch.float32)
        if self.values.dtype is torch.uint8:
            values = values - ZERO_POINT
        if self.planes == 2:
            values = values[: self.num_rows] + values[self.num_rows :] / PLANE_RATIO
        return values * self.scales[:, None]


def empty_activations(num_rows: int, dim: int, form: Format) -> Activations:
    """For a kernel to fill."""
    count = form.planes * num_rows
    values = torch.empty(count + SLACK_ROWS, dim, dtype=form.dtype)
    return Activations(values[:count], torch.empty(num_rows))
