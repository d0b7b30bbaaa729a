"""The two products of attention over one block of a bf16 KV cache, in vector registers, where the block lies.

A group of query heads shares the keys and values of one KV head, so each is loaded once for all of them.

Two neighbouring bf16 values are a 32-bit word, and each is fp32 after one shift or mask of it. So queries and
sums are kept split: of each `SPLIT` elements first those at even places, then those at odd ones. What is left
of a row after whole splits, `LANES` elements, stands in plain order.
"""

from itertools import chain
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as untyped_cgutils

from kernels.native import compiled, emit_prefetch, from_bf16, intrinsic_of, to_bf16

cgutils: Any = untyped_cgutils

LANES = 16  # head_dim must be a multiple; LLVM cuts the vectors to what the machine has

_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
_WORDS = 16 if _WIDE else 8
SPLIT = 2 * _WORDS
# Keys whose scores are summed at once: as many as their sums fit the vector registers, with four heads.
_KEYS = 4 if _WIDE else 2

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _WORDS)
_FAST = ("reassoc", "contract", "nsz")


def _constant(value: int) -> Any:
    return ir.Constant(_INT64, value)


def _place(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _offset(builder: Any, base: Any, *terms: tuple[Any, Any]) -> Any:
    """base + the products of the terms, each an int64 value or a Python int."""
    total = base
    for first, second in terms:
        factors = [_constant(each) if isinstance(each, int) else each for each in (first, second)]
        total = builder.add(total, builder.mul(*factors))
    return total


def _load_floats(builder: Any, address: Any) -> Any:
    return builder.load(_place(builder, address, _VECTOR), align=4)


def _load_split(builder: Any, address: Any) -> list[Any]:
    """`SPLIT` bf16 values as fp32: those at even places, those at odd ones."""
    kind = ir.VectorType(_INT32, _WORDS)
    words = builder.load(_place(builder, address, kind), align=2)
    even = builder.shl(words, ir.Constant(kind, [16] * _WORDS))
    odd = builder.and_(words, ir.Constant(kind, [0xFFFF0000] * _WORDS))
    return [builder.bitcast(even, _VECTOR), builder.bitcast(odd, _VECTOR)]


def _load_plain(builder: Any, address: Any) -> list[Any]:
    """`_WORDS` bf16 values as fp32."""
    halves = builder.load(_place(builder, address, ir.VectorType(ir.IntType(16), _WORDS)), align=2)
    kind = ir.VectorType(_INT32, _WORDS)
    shifted = builder.shl(builder.zext(halves, kind), ir.Constant(kind, [16] * _WORDS))
    return [builder.bitcast(shifted, _VECTOR)]


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, _WORDS), [0] * _WORDS)
    return builder.shuffle_vector(first, undefined, zeros)


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """A vector whose lane i is the sum over the lanes of vectors[i]. As many vectors as a power of two."""
    lanes = _WORDS
    while lanes > len(vectors):
        lanes //= 2
        low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
        vectors = [
            builder.fadd(_shuffle(builder, each, each, low), _shuffle(builder, each, each, high), _FAST)
            for each in vectors
        ]
    size = lanes
    while size > 1:
        # Two vectors become one: of each `size` lanes, the halves are for one and for the other.
        half = size // 2
        low = [lane if lane % size < half else lane - half + lanes for lane in range(lanes)]
        high = [lane + half if lane % size < half else lane + lanes for lane in range(lanes)]
        count = len(vectors) // 2
        vectors = [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high), _FAST)
            for a, b in zip(vectors[:count], vectors[count:], strict=True)
        ]
        size = half
    return vectors[0]


class _Cursor:
    """Walks over rows from first to last byte, as prefetchers of processors like it, a step at a time."""

    def __init__(self, builder: Any, rows: Any, row_stride: Any, head_dim: Any) -> None:
        self._steps = builder.sdiv(builder.add(head_dim, _constant(SPLIT - 1)), _constant(SPLIT))
        self._to_next_row = builder.sub(row_stride, builder.mul(self._steps, _constant(2 * SPLIT)))
        self._place = cgutils.alloca_once_value(builder, rows)
        self._left = cgutils.alloca_once_value(builder, self._steps)

    def advance(self, builder: Any) -> None:
        """Prefetches what is at the cursor and moves on."""
        place, left = builder.load(self._place), builder.sub(builder.load(self._left), _constant(1))
        emit_prefetch(builder, place)
        at_end = builder.icmp_signed("==", left, _constant(0))
        place = builder.add(place, _constant(2 * SPLIT))
        next_row = builder.add(place, self._to_next_row)
        builder.store(builder.select(at_end, next_row, place), self._place)
        builder.store(builder.select(at_end, self._steps, left), self._left)


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
        ahead: Any,
    ) -> Any:
        """scores[g, k] = query[g] · keys[k] for `group` heads; prefetches as many rows at `ahead`.

        Addresses and strides in bytes: query fp32 [group, head_dim] contiguous, split; keys bf16, a row each
        `key_stride`, as are those at `ahead`; scores fp32, a head each `score_stride`.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, keys, key_stride, num_keys, head_dim, scores, score_stride, ahead = arguments
            splits = builder.sdiv(head_dim, _constant(SPLIT))
            cursor = _Cursor(builder, ahead, key_stride, head_dim)

            def score(first: Any, count: int) -> None:
                """Of keys first … first + count - 1."""
                rows = [_offset(builder, keys, (first, key_stride), (key_stride, i)) for i in range(count)]
                sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(count)] for _ in range(group)]
                for each in chain(*sums):
                    builder.store(ir.Constant(_VECTOR, [0.0] * _WORDS), each)

                def add(load: Any, element: Any) -> None:
                    parts = [load(builder, _offset(builder, row, (element, 2))) for row in rows]
                    for _ in rows:
                        cursor.advance(builder)
                    for half in range(len(parts[0])):
                        for head in range(group):
                            place = _offset(builder, query, (element, 4), (head_dim, 4 * head))
                            factor = _load_floats(builder, _offset(builder, place, (half, 4 * _WORDS)))
                            for each, part in zip(sums[head], parts, strict=True):
                                product = builder.fmul(part[half], factor, _FAST)
                                builder.store(builder.fadd(builder.load(each), product, _FAST), each)

                with cgutils.for_range(builder, splits) as loop:
                    add(_load_split, builder.mul(loop.index, _constant(SPLIT)))
                if SPLIT > LANES:
                    whole = builder.mul(splits, _constant(SPLIT))
                    with builder.if_then(builder.icmp_signed("<", whole, head_dim)):
                        add(_load_plain, whole)
                totals = _sums_of_lanes(builder, [builder.load(each) for each in chain(*sums)])
                for head in range(group):
                    place = _offset(builder, scores, (first, 4), (score_stride, head))
                    lanes = list(range(head * count, (head + 1) * count))
                    row = _shuffle(builder, totals, totals, lanes)
                    builder.store(row, _place(builder, place, row.type), align=4)

            together = builder.sdiv(num_keys, _constant(_KEYS))
            with cgutils.for_range(builder, together) as loop:
                score(builder.mul(loop.index, _constant(_KEYS)), _KEYS)
            done = builder.mul(together, _constant(_KEYS))
            with cgutils.for_range(builder, builder.sub(num_keys, done)) as loop:
                score(builder.add(done, loop.index), 1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

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
        ahead: Any,
    ) -> Any:
        """output[g] += Σ weights[g, k] · values[k] for `group` heads; prefetches as many rows at `ahead`.

        Addresses and strides in bytes: weights fp32, a head each `weight_stride`; values bf16, a row each
        `value_stride`, as are those at `ahead`; output fp32 [group, head_dim] contiguous, split.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, weight_stride, values, value_stride, num_keys, head_dim, output, ahead = arguments
            cursor = _Cursor(builder, ahead, value_stride, head_dim)

            def add(load: Any, halves: int, element: Any) -> None:
                """To elements from `element` on."""
                column = _offset(builder, values, (element, 2))
                places = [
                    _place(
                        builder,
                        _offset(builder, output, (element, 4), (head_dim, 4 * head), (half, 4 * _WORDS)),
                        _VECTOR,
                    )
                    for head in range(group)
                    for half in range(halves)
                ]
                sums = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
                for each, place in zip(sums, places, strict=True):
                    builder.store(builder.load(place, align=4), each)
                with cgutils.for_range(builder, num_keys) as loop:
                    parts = load(builder, _offset(builder, column, (loop.index, value_stride)))
                    cursor.advance(builder)
                    for head in range(group):
                        place = _offset(builder, weights, (loop.index, 4), (weight_stride, head))
                        weight = _splat(builder, builder.load(_place(builder, place, _FLOAT)))
                        for half, part in enumerate(parts):
                            each = sums[head * halves + half]
                            product = builder.fmul(weight, part, _FAST)
                            builder.store(builder.fadd(builder.load(each), product, _FAST), each)
                for each, place in zip(sums, places, strict=True):
                    builder.store(builder.load(each), place, align=4)

            splits = builder.sdiv(head_dim, _constant(SPLIT))
            with cgutils.for_range(builder, splits) as loop:
                add(_load_split, 2, builder.mul(loop.index, _constant(SPLIT)))
            if SPLIT > LANES:
                whole = builder.mul(splits, _constant(SPLIT))
                with builder.if_then(builder.icmp_signed("<", whole, head_dim)):
                    add(_load_plain, 1, whole)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add_values


score_keys_1, score_keys_2, score_keys_4 = (_score_keys(group) for group in (1, 2, 4))
add_values_1, add_values_2, add_values_4 = (_add_values(group) for group in (1, 2, 4))


@compiled
def split_query(given: Any, scale: Any, row: Any) -> None:
    """fp32 of a bf16 row, times `scale`, split."""
    half = SPLIT // 2
    whole = len(row) // SPLIT * SPLIT
    for start in range(0, whole, SPLIT):
        for i in range(half):
            row[start + i] = from_bf16(given[start + 2 * i]) * scale
            row[start + half + i] = from_bf16(given[start + 2 * i + 1]) * scale
    for i in range(whole, len(row)):
        row[i] = from_bf16(given[i]) * scale


@compiled
def join_output(row: Any, factor: Any, result: Any) -> None:
    """bf16 of a split row of sums, times `factor`, in plain order."""
    half = SPLIT // 2
    whole = len(row) // SPLIT * SPLIT
    for start in range(0, whole, SPLIT):
        for i in range(half):
            result[start + 2 * i] = to_bf16(row[start + i] * factor)
            result[start + 2 * i + 1] = to_bf16(row[start + half + i] * factor)
    for i in range(whole, len(row)):
        result[i] = to_bf16(row[i] * factor)
