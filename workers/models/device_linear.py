"""Matrices in a GPU's memory, in the form that their file has them where the GPU can multiply that."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_matmul_ref import block_size_k
from workers.weights.fp8 import Fp8Matrix

Fp8Matmul = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class DeviceLinear(Protocol):
    """A matrix [out_features, in_features], with a bias or without."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features]. Returns [num_rows, out_features] in x's dtype."""


class DenseLinear:
    """In the dtype that is computed in, by the device's own matrix library."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Fp8Linear:
    """In FP8; activations keep their dtype."""

    def __init__(self, matrix: Fp8Matrix, matmul: Fp8Matmul, bias: Tensor | None = None) -> None:
        self._matrix = matrix
        self._matmul = matmul
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product = self._matmul(x, self._matrix.values, self._matrix.scales, self._matrix.block)
        return product if self._bias is None else (product + self._bias).to(x.dtype)


def device_linear(
    weight: Tensor | Fp8Matrix,
    device: torch.device,
    dtype: torch.dtype,
    fp8_matmul: Fp8Matmul,
    bias: Tensor | None = None,
) -> DeviceLinear:
    """Moves the matrix to the device; FP8 in blocks that no kernel cuts becomes `dtype`. bias: fp32."""
    if bias is not None:
        bias = bias.to(device)
    if isinstance(weight, Tensor):
        return DenseLinear(weight.to(device, dtype), bias)
    if not block_size_k(weight.values.shape[1], weight.block):
        return DenseLinear(weight.dequantized(dtype).to(device), bias)
    # As bytes: not every device copies FP8 by itself.
    values = weight.values.view(torch.uint8).to(device).view(weight.values.dtype)
    return Fp8Linear(Fp8Matrix(values, weight.scales.to(device), weight.block), fp8_matmul, bias)
