"""Residual addition, both norms around it and the quantization of the result, in one pass over each row."""

from typing import Any

import numpy as np
from torch import Tensor

from kernels.activations import Activations, Format, empty_activations
from kernels.native import compiled, float32_of_word, floats, words_at
from kernels.quantize_rows import load_row, store_row
from kernels.team import Kernel, float_word

_NS_PER_ELEMENT = 1.0

_ONE = np.float32(1.0)


@compiled
def sum_of_squares(row: Any) -> Any:
    """Of an fp32 row."""
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    return total


@compiled
def inverse_rms(squares: Any, dim: int, epsilon: Any) -> Any:
    """1 / sqrt(mean + epsilon) in fp32."""
    return _ONE / np.sqrt(squares / np.float32(dim) + epsilon)


@compiled
def add_rms_norm_range(
    start: int,
    end: int,
    num_rows: int,
    hidden: int,
    dim: int,
    branch: int,
    branch_scales: int,
    branch_planes: int,
    branch_weight: int,
    weight: int,
    epsilon_word: int,
    values: int,
    scales: int,
    form: int,
) -> None:
    """Rows start … end - 1; see `add_rms_norm`. `branch` 0: there is none."""
    epsilon = float32_of_word(epsilon_word)
    norm_weight = floats(weight, dim)
    added_weight = floats(branch_weight, dim)
    scratch = np.empty(dim, np.float32)
    for index in range(start, end):
        row = floats(hidden + 4 * index * dim, dim)
        if branch:
            load_row(scratch, index, num_rows, branch, branch_scales, branch_planes, 0, dim)
            factor = inverse_rms(sum_of_squares(scratch), dim, epsilon)
            for i in range(dim):
                row[i] += scratch[i] * factor * added_weight[i]
        factor = inverse_rms(sum_of_squares(row), dim, epsilon)
        for i in range(dim):
            scratch[i] = row[i] * factor * norm_weight[i]
        store_row(scratch, index, num_rows, values, scales, form)


def _rows(start: int, end: int, arguments: int) -> None:
    add_rms_norm_range(start, end, *words_at(arguments, 12))


_kernel = Kernel(_rows)


def add_rms_norm(
    hidden: Tensor,
    branch: Activations | None,
    branch_weight: Tensor,
    weight: Tensor,
    epsilon: float,
    form: Format,
) -> Activations:
    """See `add_rms_norm_ref`. All tensors contiguous; the branch's values are bf16."""
    num_rows, dim = hidden.shape
    out = empty_activations(num_rows, dim, form)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            num_rows,
            hidden.data_ptr(),
            dim,
            0 if branch is None else branch.values.data_ptr(),
            0 if branch is None else branch.scales.data_ptr(),
            0 if branch is None else branch.code,
            branch_weight.data_ptr(),
            weight.data_ptr(),
            float_word(epsilon),
            out.values.data_ptr(),
            out.scales.data_ptr(),
            form,
        ),
    )
    return out
