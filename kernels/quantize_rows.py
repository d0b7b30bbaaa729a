"""Quantization of each row by its own scale, compiled for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activations import PLANE_RATIO, Activations, Format, empty_activations
from kernels.native import (
    bf16s,
    bytes_at,
    compiled,
    floats,
    from_bf16,
    magnitude_bits,
    magnitude_of,
    to_bf16,
    words_at,
)
from kernels.rotate_rows import rotate_row
from kernels.team import Kernel

_NS_PER_ELEMENT = 0.4

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_LARGEST = np.float32(127.0)
_ZERO_POINT = np.float32(128.0)
_PLANE_RATIO = np.float32(PLANE_RATIO)
_BF16, _FP32, _INT8_PAIR = int(Format.BF16), int(Format.FP32), int(Format.INT8_PAIR)
_ROTATED_INT8, _ROTATED_INT8_PAIR = int(Format.ROTATED_INT8), int(Format.ROTATED_INT8_PAIR)


@compiled
def store_row(row: Any, index: int, num_rows: int, values: int, scales: int, form: int) -> None:
    """Writes an fp32 row, which it may change, to row `index` of `num_rows` activations at `values` and
    `scales`, in the Format whose number is `form`."""
    dim = row.shape[0]
    scale = floats(scales + 4 * index, 1)
    if form not in (_BF16, _FP32, _INT8_PAIR):
        rotate_row(row.ctypes.data, dim)
    if form in (_ROTATED_INT8, _ROTATED_INT8_PAIR, _INT8_PAIR):
        maximum_bits = np.uint32(0)
        for i in range(dim):
            maximum_bits = np.uint32(max(maximum_bits, magnitude_bits(row[i])))
        maximum = magnitude_of(maximum_bits)
        scale[0] = maximum / _LARGEST
        factor = _LARGEST / maximum if maximum != _ZERO else _ZERO
        first = bytes_at(values + index * dim, dim)
        if form == _ROTATED_INT8:
            for i in range(dim):
                first[i] = np.uint8(np.int32(np.rint(row[i] * factor) + _ZERO_POINT))
        else:
            second = bytes_at(values + (num_rows + index) * dim, dim)
            for i in range(dim):
                scaled = row[i] * factor
                rounded = np.rint(scaled)
                first[i] = np.uint8(np.int32(rounded + _ZERO_POINT))
                second[i] = np.uint8(np.int32(np.rint((scaled - rounded) * _PLANE_RATIO) + _ZERO_POINT))
        return
    scale[0] = _ONE
    if form == _FP32:
        exact = floats(values + 4 * index * dim, dim)
        for i in range(dim):
            exact[i] = row[i]
    else:
        short = bf16s(values + 2 * index * dim, dim)
        for i in range(dim):
            short[i] = to_bf16(row[i])


@compiled
def load_row(
    row: Any, index: int, num_rows: int, values: int, scales: int, planes: int, start: int, width: int
) -> None:
    """Reads what a matrix gave into an fp32 row: the values from `start` on of row `index`, where rows have
    `width`. They are bf16 with a scale for each row, or with `planes` 0 plain fp32."""
    if planes == 0:
        exact = floats(values + 4 * (index * width + start), row.shape[0])
        for i in range(row.shape[0]):
            row[i] = exact[i]
        return
    scale = floats(scales + 4 * index, 1)[0]
    first = bf16s(values + 2 * (index * width + start), row.shape[0])
    if planes == 2:
        second = bf16s(values + 2 * ((num_rows + index) * width + start), row.shape[0])
        second_scale = scale / _PLANE_RATIO
        for i in range(row.shape[0]):
            row[i] = from_bf16(first[i]) * scale + from_bf16(second[i]) * second_scale
    else:
        for i in range(row.shape[0]):
            row[i] = from_bf16(first[i]) * scale


@compiled
def quantize_range(
    start: int, end: int, num_rows: int, x: int, x_is_bf16: int, dim: int, values: int, scales: int, form: int
) -> None:
    """Rows start … end - 1; see `quantize_rows`."""
    row = np.empty(dim, np.float32)
    for index in range(start, end):
        if x_is_bf16:
            short = bf16s(x + 2 * index * dim, dim)
            for i in range(dim):
                row[i] = from_bf16(short[i])
        else:
            exact = floats(x + 4 * index * dim, dim)
            for i in range(dim):
                row[i] = exact[i]
        store_row(row, index, num_rows, values, scales, form)


def _rows(start: int, end: int, arguments: int) -> None:
    quantize_range(start, end, *words_at(arguments, 7))


_kernel = Kernel(_rows)


def quantize_rows(x: Tensor, form: Format) -> Activations:
    """See `quantize_rows_ref`. x: contiguous."""
    num_rows, dim = x.shape
    out = empty_activations(num_rows, dim, form)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            num_rows,
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            dim,
            out.values.data_ptr(),
            out.scales.data_ptr(),
            form,
        ),
    )
    return out
