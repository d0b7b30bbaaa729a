"""Gemma's gated activation and the quantization of its result, in one pass over each row."""

import numpy as np
import torch

from kernels.activations import Activations, empty_activations
from kernels.native import bf16s, claim, compiled, exp, floats, from_bf16, int64s
from kernels.quantize_rows import store_row
from kernels.team import FIRST_ARGUMENT, Kernel

_NS_PER_ELEMENT = 1.0

_ONE = np.float32(1.0)
# gelu(x) = x / 2 (1 + tanh(a (x + b x³))) = x / (1 + exp(-2a (x + b x³))) with a = sqrt(2 / π), b = 0.044715.
_LINEAR = np.float32(-1.5957691216057308)
_CUBIC = np.float32(-1.5957691216057308 * 0.044715)


@compiled
def gelu_and_mul_range(
    start: int, end: int, x: int, x_scales: int, dim: int, values: int, scales: int, quantizes: int
) -> None:
    """Rows start … end - 1; see `gelu_and_mul_quantize`."""
    activated = np.empty(dim, np.float32)
    for index in range(start, end):
        gates = bf16s(x + 4 * index * dim, dim)
        ups = bf16s(x + 4 * index * dim + 2 * dim, dim)
        scale = floats(x_scales + 4 * index, 1)[0]
        for i in range(dim):
            gate = from_bf16(gates[i]) * scale
            exponent = gate * (_LINEAR + _CUBIC * gate * gate)
            activated[i] = gate * (from_bf16(ups[i]) * scale) / (_ONE + exp(exponent))
        store_row(activated, index, values, scales, quantizes)


def _body(address: int) -> None:
    words = int64s(address, FIRST_ARGUMENT + 6)
    start = claim(address, words[2])
    while start < words[1]:
        end = min(start + words[2], words[1])
        gelu_and_mul_range(start, end, words[3], words[4], words[5], words[6], words[7], words[8])
        start = claim(address, words[2])


_kernel = Kernel(_body)


def gelu_and_mul_quantize(x: Activations, dtype: torch.dtype) -> Activations:
    """See `gelu_and_mul_quantize_ref`. x's values are contiguous bf16."""
    num_rows, dim = x.values.shape[0], x.values.shape[1] // 2
    out = empty_activations(num_rows, dim, dtype)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            x.values.data_ptr(),
            x.scales.data_ptr(),
            dim,
            out.values.data_ptr(),
            out.scales.data_ptr(),
            dtype is torch.uint8,
        ),
    )
    return out
