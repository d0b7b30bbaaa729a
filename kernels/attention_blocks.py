"""The two products of attention over one block of a bf16 KV cache, in vector registers, where the block lies.

A group of query heads shares the keys and values of one KV head, so each is loaded once for all of them.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as untyped_cgutils

from kernels.native import intrinsic_of

cgutils: Any = untyped_cgutils

LANES = 16  # head_dim must be a multiple; LLVM cuts the vectors to what the machine has

_FLOAT = ir.FloatType()
_INT64 = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FAST = ("reassoc", "contract", "nsz")


def _place(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _load_floats(builder: Any, address: Any) -> Any:
    return builder.load(_place(builder, address, _VECTOR), align=4)


def _load_bf16(builder: Any, address: Any) -> Any:
    """16 bf16 values as fp32."""
    halves = builder.load(_place(builder, address, ir.VectorType(ir.IntType(16), LANES)), align=2)
    words = ir.VectorType(ir.IntType(32), LANES)
    shifted = builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * LANES))
    return builder.bitcast(shifted, _VECTOR)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def _offset(builder: Any, base: Any, *terms: tuple[Any, Any]) -> Any:
    """base + the products of the terms, each an int64 value or a Python int."""
    total = base
    for first, second in terms:
        factors = [ir.Constant(_INT64, each) if isinstance(each, int) else each for each in (first, second)]
        total = builder.add(total, builder.mul(*factors))
    return total


def _score_keys(group: int) -> Any:
    @intrinsic_of
    def score_keys(
        typing_context: Any,
        query: Any,
        keys: Any,
        key_stride: Any,
        num_keys: Any,
        head_dim: Any,
        scores: Any,
        score_stride: Any,
    ) -> Any:
        """scores[g, k] = query[g] · keys[k] for `group` heads.

        Addresses and strides in bytes: query fp32 [group, head_dim] contiguous; keys bf16, a row each
        `key_stride`; scores fp32, a head each `score_stride`.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, keys, key_stride, num_keys, head_dim, scores, score_stride = arguments
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(group)]
            reduce = builder.module.declare_intrinsic(
                f"llvm.vector.reduce.fadd.v{LANES}f32", fnty=ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
            )
            chunks = builder.sdiv(head_dim, ir.Constant(_INT64, LANES))
            with cgutils.for_range(builder, num_keys) as key_loop:
                row = _offset(builder, keys, (key_loop.index, key_stride))
                for each in sums:
                    builder.store(ir.Constant(_VECTOR, [0.0] * LANES), each)
                with cgutils.for_range(builder, chunks) as chunk_loop:
                    part = _load_bf16(builder, _offset(builder, row, (chunk_loop.index, 2 * LANES)))
                    for head, each in enumerate(sums):
                        place = _offset(builder, query, (chunk_loop.index, 4 * LANES), (head_dim, 4 * head))
                        product = builder.fmul(part, _load_floats(builder, place), _FAST)
                        builder.store(builder.fadd(builder.load(each), product, _FAST), each)
                for head, each in enumerate(sums):
                    total = builder.call(
                        reduce, [ir.Constant(_FLOAT, 0.0), builder.load(each)], fastmath=_FAST
                    )
                    place = _offset(builder, scores, (key_loop.index, 4), (score_stride, head))
                    builder.store(total, _place(builder, place, _FLOAT))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return score_keys


def _add_values(group: int) -> Any:
    @intrinsic_of
    def add_values(
        typing_context: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        value_stride: Any,
        num_keys: Any,
        head_dim: Any,
        output: Any,
    ) -> Any:
        """output[g] += Σ weights[g, k] · values[k] for `group` heads.

        Addresses and strides in bytes: weights fp32, a head each `weight_stride`; values bf16, a row each
        `value_stride`; output fp32 [group, head_dim] contiguous.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, weight_stride, values, value_stride, num_keys, head_dim, output = arguments
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(group)]
            chunks = builder.sdiv(head_dim, ir.Constant(_INT64, LANES))
            with cgutils.for_range(builder, chunks) as chunk_loop:
                places = [
                    _place(
                        builder,
                        _offset(builder, output, (chunk_loop.index, 4 * LANES), (head_dim, 4 * head)),
                        _VECTOR,
                    )
                    for head in range(group)
                ]
                for each, place in zip(sums, places, strict=True):
                    builder.store(builder.load(place, align=4), each)
                column = _offset(builder, values, (chunk_loop.index, 2 * LANES))
                with cgutils.for_range(builder, num_keys) as key_loop:
                    part = _load_bf16(builder, _offset(builder, column, (key_loop.index, value_stride)))
                    for head, each in enumerate(sums):
                        place = _offset(builder, weights, (key_loop.index, 4), (weight_stride, head))
                        weight = builder.load(_place(builder, place, _FLOAT))
                        product = builder.fmul(_splat(builder, weight), part, _FAST)
                        builder.store(builder.fadd(builder.load(each), product, _FAST), each)
                for each, place in zip(sums, places, strict=True):
                    builder.store(builder.load(each), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return add_values


score_keys_1, score_keys_2, score_keys_4 = (_score_keys(group) for group in (1, 2, 4))
add_values_1, add_values_2, add_values_4 = (_add_values(group) for group in (1, 2, 4))
