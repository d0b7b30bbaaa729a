"""The Hadamard transform of 128 floats in vector registers."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.native import intrinsic_of

HADAMARD_SIZE = 128
_LANES = 16


@intrinsic_of
def hadamard(typing_context: Any, address: Any) -> Any:
    """Transforms the 128 fp32 values at `address` in place, scaled to be orthogonal.

    Eight vectors of 16 lanes, which LLVM cuts to what the machine has: three stages between vectors, four
    between the lanes of each.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), _LANES)
        index = ir.VectorType(ir.IntType(32), _LANES)
        base = builder.inttoptr(arguments[0], vector.as_pointer())
        places = [builder.gep(base, [ir.Constant(ir.IntType(64), i)]) for i in range(HADAMARD_SIZE // _LANES)]
        values = [builder.load(place, align=4) for place in places]
        stride = 1
        while stride < len(values):
            for start in range(0, len(values), 2 * stride):
                for i in range(start, start + stride):
                    first, second = values[i], values[i + stride]
                    values[i], values[i + stride] = (
                        builder.fadd(first, second),
                        builder.fsub(first, second),
                    )
            stride *= 2
        stride = 1
        while stride < _LANES:
            partner = ir.Constant(index, [lane ^ stride for lane in range(_LANES)])
            sign = ir.Constant(vector, [-1.0 if lane & stride else 1.0 for lane in range(_LANES)])
            values = [
                builder.fadd(
                    builder.fmul(v, sign, ("contract",)), builder.shuffle_vector(v, v, partner), ("contract",)
                )
                for v in values
            ]
            stride *= 2
        scale = ir.Constant(vector, [HADAMARD_SIZE**-0.5] * _LANES)
        for place, value in zip(places, values, strict=True):
            builder.store(builder.fmul(value, scale), place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64), generate
