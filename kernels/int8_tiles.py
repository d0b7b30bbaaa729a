"""uint8 × int8 products of small tiles with the processor's own instructions.

Weights lie in panels of 16 output channels: [out_features / 16, in_features / 4, 16, 4], so that one vector
register holds four inputs of 16 channels (VNNI), and 1,024 bytes in a row are one AMX tile.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from kernels.native import intrinsic_of

cgutils: Any = untyped_cgutils

PANEL = 16  # output channels
PANELS = 2  # of one tile

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FEATURES = dict(llvmlite.binding.get_host_cpu_features())
HAS_VNNI = bool(_FEATURES.get("avx512vnni") and _FEATURES.get("avx512f"))
# Elsewhere oneDNN has its reference code for int8 and nothing more: a prompt takes it minutes.
ONEDNN_HAS_INT8 = bool(_FEATURES.get("avx512f") or _FEATURES.get("avxvnni"))
HAS_AMX = bool(_FEATURES.get("amx-int8") and _FEATURES.get("amx-tile"))

_ACCUMULATORS = ir.VectorType(_INT32, PANEL)
_QUADS = ir.VectorType(_INT8, 4 * PANEL)


def place_of(builder: Any, address: Any, element: Any = _INT8, offset: int = 0) -> Any:
    """A pointer to what lies `offset` bytes behind an address."""
    if offset:
        address = builder.add(address, ir.Constant(_INT64, offset))
    return builder.inttoptr(address, element.as_pointer())


def splat_word(builder: Any, address: Any, offset: int = 0) -> Any:
    """Four bytes, the same for all channels of a panel."""
    four = builder.load(place_of(builder, address, _INT32, offset), align=4)
    undefined = ir.Constant(_ACCUMULATORS, ir.Undefined)
    first = builder.insert_element(undefined, four, ir.Constant(_INT32, 0))
    zeros = ir.Constant(_ACCUMULATORS, [0] * PANEL)
    return builder.bitcast(builder.shuffle_vector(first, undefined, zeros), _QUADS)


def dot_of(builder: Any) -> Any:
    """The instruction: int32 sums + uint8 times int8, four of each for every sum."""
    return builder.module.declare_intrinsic(
        "llvm.x86.avx512.vpdpbusd.512",
        fnty=ir.FunctionType(_ACCUMULATORS, [_ACCUMULATORS, _QUADS, _QUADS]),
    )


def _plus(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(_INT64, size)))


def vnni_tile(num_rows: int) -> Any:
    """An intrinsic for `num_rows` rows and PANELS panels."""

    @intrinsic_of
    def multiply(
        typing_context: Any, x: Any, x_stride: Any, weights: Any, in_features: Any, sums: Any
    ) -> Any:
        """Writes int32 sums [num_rows, PANELS * 16]. Addresses; x: uint8 rows of `width`,
        each `x_stride` bytes."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, weights, width, sums = arguments
            dot = dot_of(builder)
            zeros = ir.Constant(_ACCUMULATORS, [0] * PANEL)
            totals = [
                [cgutils.alloca_once(builder, _ACCUMULATORS) for _ in range(PANELS)] for _ in range(num_rows)
            ]
            for row in totals:
                for total in row:
                    builder.store(zeros, total)
            panel_bytes = builder.mul(width, ir.Constant(_INT64, PANEL))
            panels = [weights]
            for _ in range(PANELS - 1):
                panels.append(builder.add(panels[-1], panel_bytes))
            rows = [x]
            for _ in range(num_rows - 1):
                rows.append(builder.add(rows[-1], x_stride))
            with cgutils.for_range(builder, builder.sdiv(width, ir.Constant(_INT64, 4))) as loop:
                quads = [
                    builder.load(
                        place_of(builder, _plus(builder, each, loop.index, 4 * PANEL), _QUADS), align=64
                    )
                    for each in panels
                ]
                for row, row_totals in zip(rows, totals, strict=True):
                    same = splat_word(builder, _plus(builder, row, loop.index, 4))
                    for quad, total in zip(quads, row_totals, strict=True):
                        builder.store(builder.call(dot, [builder.load(total), same, quad]), total)
            for index, row_totals in enumerate(totals):
                for panel, total in enumerate(row_totals):
                    place = builder.add(sums, ir.Constant(_INT64, 4 * PANEL * (index * PANELS + panel)))
                    builder.store(builder.load(total), place_of(builder, place, _ACCUMULATORS), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return multiply


def amx_call(builder: Any, name: str, *arguments: Any, there: bool = HAS_AMX) -> None:
    """`there`: this processor has the instruction. Without it LLVM ends the process when it compiles it, even
    in a branch that is never taken: what is compiled instead ends the process if it is.
    """
    if not there:
        builder.call(
            builder.module.declare_intrinsic("llvm.trap", fnty=ir.FunctionType(ir.VoidType(), [])), []
        )
        return
    function = builder.module.declare_intrinsic(
        f"llvm.x86.{name}", fnty=ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    )
    builder.call(function, list(arguments))


def tile(number: int) -> Any:
    return ir.Constant(_INT8, number)


@intrinsic_of
def amx_begin(typing_context: Any, config: Any) -> Any:
    """Sets up this thread's tiles from the 64 bytes at `config`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        amx_call(builder, "ldtilecfg", place_of(builder, arguments[0], _INT8))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic_of
def amx_end(typing_context: Any) -> Any:
    """Gives this thread's tiles back: a context switch need not save them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        amx_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def amx_tile(row_tiles: int) -> Any:
    """An intrinsic for `row_tiles` (1 or 2) times 16 rows and PANELS panels."""

    @intrinsic_of
    def multiply(
        typing_context: Any, x: Any, x_stride: Any, weights: Any, in_features: Any, sums: Any
    ) -> Any:
        """As `vnni_tile`; width must be a multiple of 64."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, weights, width, sums = arguments
            # Tiles 0 … 3 are sums, 4 and 5 rows, 6 and 7 weights.
            for number in range(row_tiles * PANELS):
                amx_call(builder, "tilezero", tile(number))
            panel_bytes = builder.mul(width, ir.Constant(_INT64, PANEL))
            row_bytes = builder.mul(x_stride, ir.Constant(_INT64, 16))
            sixty_four = ir.Constant(_INT64, 64)
            with cgutils.for_range(builder, builder.sdiv(width, sixty_four)) as loop:
                for index in range(row_tiles):
                    start = builder.add(x, builder.mul(row_bytes, ir.Constant(_INT64, index)))
                    place = place_of(builder, _plus(builder, start, loop.index, 64), _INT8)
                    amx_call(builder, "tileloadd64", tile(4 + index), place, x_stride)
                for panel in range(PANELS):
                    start = builder.add(weights, builder.mul(panel_bytes, ir.Constant(_INT64, panel)))
                    place = place_of(builder, _plus(builder, start, loop.index, 1024), _INT8)
                    amx_call(builder, "tileloadd64", tile(6 + panel), place, sixty_four)
                for index in range(row_tiles):
                    for panel in range(PANELS):
                        numbers = tile(index * PANELS + panel), tile(4 + index), tile(6 + panel)
                        amx_call(builder, "tdpbusd", *numbers)
            stride = ir.Constant(_INT64, 4 * PANEL * PANELS)
            for index in range(row_tiles):
                for panel in range(PANELS):
                    offset = index * 16 * 4 * PANEL * PANELS + panel * 4 * PANEL
                    place = place_of(builder, builder.add(sums, ir.Constant(_INT64, offset)), _INT8)
                    amx_call(builder, "tilestored64", tile(index * PANELS + panel), place, stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return multiply


Multiply = Callable[[int, int, int, int, int], None]
vnni_1: Multiply = vnni_tile(1)
vnni_2: Multiply = vnni_tile(2)
vnni_4: Multiply = vnni_tile(4)
vnni_8: Multiply = vnni_tile(8)
amx_16: Multiply = amx_tile(1)
amx_32: Multiply = amx_tile(2)
