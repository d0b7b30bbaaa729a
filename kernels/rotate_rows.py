"""Rotation of rows before they are quantized, compiled for the CPU."""

import numpy as np
import torch
from torch import Tensor

from kernels.hadamard import HADAMARD_SIZE, hadamard
from kernels.native import compiled, floats, words_at
from kernels.team import Kernel

_NS_PER_ELEMENT = 1.0

_ONE = np.float32(1.0)


@compiled
def rotate_row(address: int, dim: int) -> None:
    """Rotates the fp32 row at an address in place: see `rotate_rows_ref`."""
    if dim % HADAMARD_SIZE == 0:
        for start in range(0, dim, HADAMARD_SIZE):
            hadamard(address + 4 * start)
        return
    group = 1
    while dim % (2 * group) == 0:
        group *= 2
    row = floats(address, dim)
    stride = 1
    while stride < group:
        for start in range(0, dim, 2 * stride):
            for i in range(start, start + stride):
                first, second = row[i], row[i + stride]
                row[i] = first + second
                row[i + stride] = first - second
        stride *= 2
    factor = _ONE / np.sqrt(np.float32(group))
    for i in range(dim):
        row[i] *= factor


@compiled
def rotate_range(start: int, end: int, x: int, dim: int) -> None:
    """Rows start … end - 1; see `rotate_rows_`."""
    for index in range(start, end):
        rotate_row(x + 4 * index * dim, dim)


def _rows(start: int, end: int, arguments: int) -> None:
    rotate_range(start, end, *words_at(arguments, 2))


_kernel = Kernel(_rows)


def rotate_rows_(x: Tensor) -> Tensor:
    """`rotate_rows_ref` in place. x: fp32 [num_rows, dim], contiguous. Returns x."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"rows to rotate must be contiguous fp32, got {x.dtype} with strides {x.stride()}")
    num_rows, dim = x.shape
    _kernel(num_rows, dim * _NS_PER_ELEMENT, (x.data_ptr(), dim))
    return x
