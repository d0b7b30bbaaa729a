"""Gemma's gated activation and the quantization of its result, in one pass over each row."""

import numpy as np

from kernels.activations import Activations, Format, empty_activations
from kernels.native import compiled, exp, words_at
from kernels.quantize_rows import load_row, store_row
from kernels.team import Kernel

_NS_PER_ELEMENT = 1.0

_ONE = np.float32(1.0)
# gelu(x) = x / 2 (1 + tanh(a (x + b x³))) = x / (1 + exp(-2a (x + b x³))) with a = sqrt(2 / π), b = 0.044715.
_LINEAR = np.float32(-1.5957691216057308)
_CUBIC = np.float32(-1.5957691216057308 * 0.044715)


@compiled
def gelu_and_mul_range(
    start: int,
    end: int,
    num_rows: int,
    x: int,
    x_scales: int,
    x_planes: int,
    dim: int,
    values: int,
    scales: int,
    form: int,
) -> None:
    """Rows start … end - 1; see `gelu_and_mul_quantize`."""
    gates, ups = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for index in range(start, end):
        load_row(gates, index, num_rows, x, x_scales, x_planes, 0, 2 * dim)
        load_row(ups, index, num_rows, x, x_scales, x_planes, dim, 2 * dim)
        for i in range(dim):
            gate = gates[i]
            exponent = gate * (_LINEAR + _CUBIC * gate * gate)
            ups[i] = gate * ups[i] / (_ONE + exp(exponent))
        store_row(ups, index, num_rows, values, scales, form)


def _rows(start: int, end: int, arguments: int) -> None:
    gelu_and_mul_range(start, end, *words_at(arguments, 8))


_kernel = Kernel(_rows)


def gelu_and_mul_quantize(x: Activations, form: Format) -> Activations:
    """See `gelu_and_mul_quantize_ref`. x's values are contiguous bf16."""
    num_rows, dim = x.num_rows, x.values.shape[1] // 2
    out = empty_activations(num_rows, dim, form)
    _kernel(
        num_rows,
        dim * _NS_PER_ELEMENT,
        (
            num_rows,
            x.values.data_ptr(),
            x.scales.data_ptr(),
            x.code,
            dim,
            out.values.data_ptr(),
            out.scales.data_ptr(),
            form,
        ),
    )
    return out
