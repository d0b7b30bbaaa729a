"""Quantization of each row by its own scale, compiled for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activations import Activations, empty_activations
from kernels.native import (
    bf16s,
    bytes_at,
    claim,
    compiled,
    floats,
    from_bf16,
    inlined,
    int64s,
    magnitude_bits,
    magnitude_of,
    to_bf16,
)
from kernels.rotate_rows import rotate_row
from kernels.team import FIRST_ARGUMENT, Kernel

_NS_PER_ELEMENT = 0.3

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_LARGEST = np.float32(127.0)
_ZERO_POINT = np.float32(128.0)


@inlined
def store_row(row: Any, index: int, values: int, scales: int, quantizes: int) -> None:
    """Writes an fp32 row, which it may change, to row `index` of activations at `values` and `scales`."""
    dim = row.shape[0]
    scale = floats(scales + 4 * index, 1)
    if quantizes:
        rotate_row(row.ctypes.data, dim)
        maximum_bits = np.uint32(0)
        for i in range(dim):
            maximum_bits = np.uint32(max(maximum_bits, magnitude_bits(row[i])))
        maximum = magnitude_of(maximum_bits)
        scale[0] = maximum / _LARGEST
        factor = _LARGEST / maximum if maximum != _ZERO else _ZERO
        quantized = bytes_at(values + index * dim, dim)
        for i in range(dim):
            quantized[i] = np.uint8(np.int32(np.rint(row[i] * factor) + _ZERO_POINT))
    else:
        scale[0] = _ONE
        rounded = bf16s(values + 2 * index * dim, dim)
        for i in range(dim):
            rounded[i] = to_bf16(row[i])


@compiled
def quantize_range(
    start: int, end: int, x: int, x_is_bf16: int, dim: int, values: int, scales: int, quantizes: int
) -> None:
    """Rows start … end - 1; see `quantize_rows`."""
    converted = np.empty(dim, np.float32)
    for index in range(start, end):
        if x_is_bf16:
            source = bf16s(x + 2 * index * dim, dim)
            for i in range(dim):
                converted[i] = from_bf16(source[i])
        else:
            floats_in = floats(x + 4 * index * dim, dim)
            for i in range(dim):
                converted[i] = floats_in[i]
        store_row(converted, index, values, scales, quantizes)


def _body(address: int) -> None:
    words = int64s(address, FIRST_ARGUMENT + 6)
    start = claim(address, words[2])
    while start < words[1]:
        end = min(start + words[2], words[1])
        quantize_range(start, end, words[3], words[4], words[5], words[6], words[7], words[8])
        start = claim(address, words[2])


_kernel = Kernel(_body)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Activations:
    """See `quantize_rows_ref`. x: contiguous; dtype: uint8 or bf16."""
    num_rows, dim = x.shape
    out = empty_activations(num_rows, dim, dtype)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            dim,
            out.values.data_ptr(),
            out.scales.data_ptr(),
            dtype is torch.uint8,
        ),
    )
    return out
