"""Products with int8 weights that have a scale for each 32 inputs of a channel, in vectors and AMX tiles.

Weights lie in panels as in `int8_tiles`; their scales, fp16, in [out_features / 16, in_features / 32, 16].
Scales of GGUF's Q8_0 and Q5_0 are taken over as they are, so nothing is lost of what such a file says.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from kernels.activations import PLANE_RATIO
from kernels.int8_tiles import HAS_AMX, PANEL, PANELS, amx_call, dot_of, place_of, splat_word, tile
from kernels.native import intrinsic_of

cgutils: Any = untyped_cgutils

BLOCK = 32  # inputs that share a scale
HAS_AMX_BF16 = HAS_AMX and bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16"))

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_INT32S = ir.VectorType(_INT32, PANEL)
_FLOATS = ir.VectorType(ir.FloatType(), PANEL)
_HALVES = ir.VectorType(ir.HalfType(), PANEL)
_QUADS = ir.VectorType(ir.IntType(8), 4 * PANEL)
_QUADS_OF_BLOCK = BLOCK // 4
_FAST = ("reassoc", "contract", "nsz")


def _same(value: int) -> Any:
    return ir.Constant(_INT32S, [value] * PANEL)


def _load_scales(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.load(place_of(builder, address, _HALVES), align=2), _FLOATS)


def vnni_block_tile(num_rows: int) -> Any:
    """An intrinsic for `num_rows` rows of two planes (see `Format.INT8_PAIR`) and PANELS panels."""

    @intrinsic_of
    def multiply(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        plane_stride: Any,
        weights: Any,
        scales: Any,
        width: Any,
        out: Any,
    ) -> Any:
        """Writes fp32 [num_rows, PANELS * 16]: the sums of all blocks, scaled, with what the zero point of
        the activations adds. Addresses and strides in bytes."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, plane_stride, weights, scales, width, out = arguments
            dot = dot_of(builder)
            share = ir.Constant(_FLOATS, [1.0 / PLANE_RATIO] * PANEL)
            totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(PANELS)] for _ in range(num_rows)]
            for row in totals:
                for total in row:
                    builder.store(ir.Constant(_FLOATS, [0.0] * PANEL), total)
            panel_bytes = builder.mul(width, ir.Constant(_INT64, PANEL))
            rows = [x]
            for _ in range(num_rows - 1):
                rows.append(builder.add(rows[-1], x_stride))
            planes = [[row, builder.add(row, plane_stride)] for row in rows]
            with cgutils.for_range(builder, builder.sdiv(width, ir.Constant(_INT64, BLOCK))) as loop:
                input_offset = builder.mul(loop.index, ir.Constant(_INT64, BLOCK))
                weight_offset = builder.mul(loop.index, ir.Constant(_INT64, BLOCK * PANEL))
                panels = []
                panel, scale = builder.add(weights, weight_offset), builder.add(scales, input_offset)
                for _ in range(PANELS):
                    panels.append((panel, _load_scales(builder, scale)))
                    # A panel's scales take as many bytes as it has inputs.
                    panel, scale = builder.add(panel, panel_bytes), builder.add(scale, width)
                sums = [[[_same(0)] * PANELS for _ in range(2)] for _ in range(num_rows)]
                for quad in range(_QUADS_OF_BLOCK):
                    quads = [
                        builder.load(place_of(builder, panel, _QUADS, quad * 4 * PANEL), align=64)
                        for panel, _ in panels
                    ]
                    for row_planes, row_sums in zip(planes, sums, strict=True):
                        for plane, plane_sums in zip(row_planes, row_sums, strict=True):
                            four = splat_word(builder, builder.add(plane, input_offset), 4 * quad)
                            for index, each in enumerate(quads):
                                plane_sums[index] = builder.call(dot, [plane_sums[index], four, each])
                for row_totals, (first, second) in zip(totals, sums, strict=True):
                    for index, (_, scale) in enumerate(panels):
                        low = builder.fmul(builder.sitofp(second[index], _FLOATS), share, _FAST)
                        both = builder.fadd(builder.sitofp(first[index], _FLOATS), low, _FAST)
                        before = builder.load(row_totals[index])
                        builder.store(
                            builder.fadd(before, builder.fmul(both, scale, _FAST), _FAST), row_totals[index]
                        )
            for row_index, row_totals in enumerate(totals):
                for index, total in enumerate(row_totals):
                    offset = 4 * PANEL * (row_index * PANELS + index)
                    builder.store(builder.load(total), place_of(builder, out, _FLOATS, offset), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return multiply


@intrinsic_of
def panel_to_bf16(typing_context: Any, weights: Any, scales: Any, width: Any, out: Any) -> Any:
    """Writes one panel as bf16 [width / 2, 16, 2], to nearest, ties away from zero. Addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, width, out = arguments
        with cgutils.for_range(builder, builder.sdiv(width, ir.Constant(_INT64, BLOCK))) as loop:
            block = builder.add(weights, builder.mul(loop.index, ir.Constant(_INT64, BLOCK * PANEL)))
            target = builder.add(out, builder.mul(loop.index, ir.Constant(_INT64, 2 * BLOCK * PANEL)))
            scale = _load_scales(
                builder, builder.add(scales, builder.mul(loop.index, ir.Constant(_INT64, BLOCK)))
            )
            base = builder.fmul(scale, ir.Constant(_FLOATS, [-384.0] * PANEL))
            for quad in range(_QUADS_OF_BLOCK):
                words = builder.load(place_of(builder, block, _INT32S, quad * 4 * PANEL), align=64)
                words = builder.xor(words, _same(0x80808080))
                rounded = []
                for byte in range(4):
                    # 256 + 128 + q as fp32, without a conversion: q + 128 becomes the lowest of its bits.
                    shift = 15 - 8 * byte
                    moved = (builder.shl if shift > 0 else builder.lshr)(words, _same(abs(shift)))
                    bits = builder.or_(builder.and_(moved, _same(0xFF << 15)), _same(0x43800000))
                    value = builder.fadd(
                        builder.fmul(builder.bitcast(bits, _FLOATS), scale, _FAST), base, _FAST
                    )
                    rounded.append(builder.add(builder.bitcast(value, _INT32S), _same(0x8000)))
                for pair in range(2):
                    even, odd = rounded[2 * pair : 2 * pair + 2]
                    both = builder.or_(builder.lshr(even, _same(16)), builder.and_(odd, _same(0xFFFF0000)))
                    place = place_of(builder, target, _INT32S, (2 * quad + pair) * 4 * PANEL)
                    builder.store(both, place, align=64)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def amx_bf16_tile(row_tiles: int) -> Any:
    """An intrinsic for `row_tiles` (1 or 2) times 16 rows of bf16 and PANELS panels of bf16."""

    @intrinsic_of
    def multiply(
        typing_context: Any, x: Any, x_stride: Any, panels: Any, width: Any, out: Any, out_stride: Any
    ) -> Any:
        """Writes fp32 [16 * row_tiles, PANELS * 16]. Addresses and strides in bytes; panels from
        `panel_to_bf16`, one behind the other; width, in values, must be a multiple of 32."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, panels, width, out, out_stride = arguments
            # Tiles 0 … 3 are sums, 4 and 5 rows, 6 and 7 weights.
            for number in range(row_tiles * PANELS):
                amx_call(builder, "tilezero", tile(number))
            sixty_four = ir.Constant(_INT64, 64)
            sixteen = ir.Constant(_INT64, 16)
            panel_bytes = builder.mul(width, ir.Constant(_INT64, 2 * PANEL))
            with cgutils.for_range(builder, builder.sdiv(width, ir.Constant(_INT64, BLOCK))) as loop:
                row = builder.add(x, builder.mul(loop.index, sixty_four))
                for index in range(row_tiles):
                    amx_call(builder, "tileloadd64", tile(4 + index), place_of(builder, row), x_stride)
                    row = builder.add(row, builder.mul(x_stride, sixteen))
                panel = builder.add(panels, builder.mul(loop.index, ir.Constant(_INT64, 1024)))
                for index in range(PANELS):
                    amx_call(builder, "tileloadd64", tile(6 + index), place_of(builder, panel), sixty_four)
                    panel = builder.add(panel, panel_bytes)
                for index in range(row_tiles):
                    for other in range(PANELS):
                        numbers = tile(index * PANELS + other), tile(4 + index), tile(6 + other)
                        amx_call(builder, "tdpbf16ps", *numbers, there=HAS_AMX_BF16)
            for index in range(row_tiles):
                for other in range(PANELS):
                    place = place_of(builder, out, offset=4 * PANEL * other)
                    amx_call(builder, "tilestored64", tile(index * PANELS + other), place, out_stride)
                out = builder.add(out, builder.mul(out_stride, sixteen))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


vnni_block_1: Callable[[int, int, int, int, int, int, int], None] = vnni_block_tile(1)
vnni_block_2: Callable[[int, int, int, int, int, int, int], None] = vnni_block_tile(2)
vnni_block_4: Callable[[int, int, int, int, int, int, int], None] = vnni_block_tile(4)
amx_bf16_16: Callable[[int, int, int, int, int, int], None] = amx_bf16_tile(1)
amx_bf16_32: Callable[[int, int, int, int, int, int], None] = amx_bf16_tile(2)
