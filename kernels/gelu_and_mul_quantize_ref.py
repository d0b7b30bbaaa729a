"""Gemma's gated activation between two quantized matrices, plain torch."""

from kernels.activations import Activations, Format
from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.quantize_rows_ref import quantize_rows_ref


def gelu_and_mul_quantize_ref(x: Activations, form: Format) -> Activations:
    """`gelu_tanh(gate) * up` in fp32, then as the next matrix takes it.

    x: what a matrix gave, [num_rows, 2 * dim], gate first; form: of the result [num_rows, dim].
    """
    return quantize_rows_ref(gelu_and_mul_ref(x.dequantize()), form)
