"""Residual addition, both norms around it and the quantization of the result, in one pass over each row."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activations import Activations, empty_activations
from kernels.native import bf16s, claim, compiled, float32_of_word, floats, from_bf16, inlined, int64s
from kernels.quantize_rows import store_row
from kernels.team import FIRST_ARGUMENT, Kernel, float_word

_NS_PER_ELEMENT = 1.0

_ONE = np.float32(1.0)


@inlined
def inverse_rms(sum_of_squares: Any, dim: int, epsilon: Any) -> Any:
    """1 / sqrt(mean + epsilon) in fp32."""
    return _ONE / np.sqrt(sum_of_squares / np.float32(dim) + epsilon)


@compiled
def add_rms_norm_range(
    start: int,
    end: int,
    hidden: int,
    dim: int,
    branch: int,
    branch_scales: int,
    branch_weight: int,
    weight: int,
    epsilon_word: int,
    values: int,
    scales: int,
    kind: int,
) -> None:
    """Rows start … end - 1; see `add_rms_norm`. `branch` 0: none; `kind` 0: bf16, 1: uint8, 2: fp32."""
    epsilon = float32_of_word(epsilon_word)
    norm_weight = floats(weight, dim)
    added_weight = floats(branch_weight, dim)
    normed = np.empty(dim, np.float32)
    for index in range(start, end):
        row = floats(hidden + 4 * index * dim, dim)
        if branch:
            added = bf16s(branch + 2 * index * dim, dim)
            scale = floats(branch_scales + 4 * index, 1)[0]
            total = np.float32(0.0)
            for i in range(dim):
                value = from_bf16(added[i])
                total += value * value
            factor = scale * inverse_rms(total * scale * scale, dim, epsilon)
            for i in range(dim):
                row[i] += from_bf16(added[i]) * factor * added_weight[i]
        total = np.float32(0.0)
        for i in range(dim):
            total += row[i] * row[i]
        factor = inverse_rms(total, dim, epsilon)
        if kind == 2:
            normed = floats(values + 4 * index * dim, dim)
            floats(scales + 4 * index, 1)[0] = _ONE
        for i in range(dim):
            normed[i] = row[i] * factor * norm_weight[i]
        if kind != 2:
            store_row(normed, index, values, scales, kind)


def _body(address: int) -> None:
    words = int64s(address, FIRST_ARGUMENT + 10)
    start = claim(address, words[2])
    while start < words[1]:
        end = min(start + words[2], words[1])
        add_rms_norm_range(
            start,
            end,
            words[3],
            words[4],
            words[5],
            words[6],
            words[7],
            words[8],
            words[9],
            words[10],
            words[11],
            words[12],
        )
        start = claim(address, words[2])


_kernel = Kernel(_body)
_KINDS = {torch.bfloat16: 0, torch.uint8: 1, torch.float32: 2}


def add_rms_norm(
    hidden: Tensor,
    branch: Activations | None,
    branch_weight: Tensor,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Activations:
    """See `add_rms_norm_ref`. All tensors contiguous; the branch's values are bf16."""
    num_rows, dim = hidden.shape
    out = empty_activations(num_rows, dim, dtype)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            hidden.data_ptr(),
            dim,
            0 if branch is None else branch.values.data_ptr(),
            0 if branch is None else branch.scales.data_ptr(),
            branch_weight.data_ptr(),
            weight.data_ptr(),
            float_word(epsilon),
            out.values.data_ptr(),
            out.scales.data_ptr(),
            _KINDS[dtype],
        ),
    )
    return out
