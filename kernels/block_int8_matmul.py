"""Matrix products with int8 weights that have a scale for each 32 inputs of a channel, and an fp32 result.

A few rows come as int8 in two planes and are multiplied as they are: all is bound by reading the weights.
For more rows each panel of weights becomes bf16 in the cache, once for all rows, and AMX multiplies: with a
scale for each 32 inputs int8 sums would have to leave the tiles after every instruction.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.activations import PLANE_RATIO, ZERO_POINT, Activations, Format
from kernels.block_int8_tiles import (
    BLOCK,
    HAS_AMX_BF16,
    amx_bf16_16,
    amx_bf16_32,
    panel_to_bf16,
    vnni_block_1,
    vnni_block_2,
    vnni_block_4,
)
from kernels.int8_matmul import UNIT, amx_config, pack_values
from kernels.int8_tiles import PANEL, PANELS, amx_begin, amx_end
from kernels.native import compiled, floats, words_at
from kernels.team import Kernel

# Up to so many rows VNNI is as fast as making bf16 of the weights.
_FEW_ROWS = 8
_NS_PER_WEIGHT = 0.1
_LINE = 64


@dataclass(frozen=True, slots=True)
class BlockPanelWeights:
    """int8 weights of [out_features, in_features], as `block_int8_tiles` wants them.

    panels: int8 [out_features / 16, in_features / 4, 16, 4]; scales: fp16 [out_features / 16, in_features /
    32, 16]; offsets: fp32 [out_features], what the zero point of the activations adds to a row of scale 1.
    """

    panels: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def out_features(self) -> int:
        return self.offsets.shape[0]

    @property
    def in_features(self) -> int:
        return 4 * self.panels.shape[1]


def input_format(num_rows: int) -> Format:
    """How `num_rows` rows must come."""
    return Format.BF16 if num_rows > _FEW_ROWS and HAS_AMX_BF16 and amx_config() else Format.INT8_PAIR


def pack_blocks(values: Tensor, scales: Tensor) -> BlockPanelWeights:
    """For matrices that `supports_panels` says this processor multiplies.

    values: int8 [out_features, in_features]; scales: fp16 [out_features, in_features / 32]."""
    out_features, num_blocks = scales.shape
    block_sums = values.view(out_features, num_blocks, BLOCK).sum(dim=2, dtype=torch.int32)
    offsets = (block_sums * scales.double()).sum(dim=1) * (ZERO_POINT * (1 + 1 / PLANE_RATIO))
    return BlockPanelWeights(
        pack_values(values),
        scales.view(out_features // PANEL, PANEL, num_blocks).transpose(1, 2).contiguous(),
        offsets.float(),
    )


@compiled
def block_int8_matmul_range(
    start: int,
    end: int,
    x: int,
    x_scales: int,
    num_rows: int,
    is_bf16: int,
    in_features: int,
    panels: int,
    scales: int,
    offsets: int,
    out: int,
    out_stride: int,
    config: int,
) -> None:
    """Units start … end - 1 of 32 output channels: fp32 at `out`, rows `out_stride` values apart.

    x: rows of `input_format(num_rows)`, with SLACK_ROWS more that can be read; other addresses as in
    `BlockPanelWeights`; config: from `amx_config`.
    """
    if is_bf16:
        _multiply_bf16(start, end, x, num_rows, in_features, panels, scales, out, out_stride, config)
        return
    sums = np.empty((4, UNIT), np.float32)
    place = sums.ctypes.data
    plane = num_rows * in_features
    row_scales = floats(x_scales, num_rows)
    for unit in range(start, end):
        weights = panels + unit * UNIT * in_features
        weight_scales = scales + unit * PANELS * in_features
        channel_offsets = floats(offsets + 4 * unit * UNIT, UNIT)
        row = 0
        while row < num_rows:
            rows = x + row * in_features
            left = num_rows - row
            if left >= 4:
                vnni_block_4(rows, in_features, plane, weights, weight_scales, in_features, place)
                count = 4
            elif left >= 2:
                vnni_block_2(rows, in_features, plane, weights, weight_scales, in_features, place)
                count = 2
            else:
                vnni_block_1(rows, in_features, plane, weights, weight_scales, in_features, place)
                count = 1
            for index in range(count):
                result = floats(out + 4 * ((row + index) * out_stride + unit * UNIT), UNIT)
                scale = row_scales[row + index]
                for i in range(UNIT):
                    result[i] = (sums[index, i] - channel_offsets[i]) * scale
            row += count


@compiled
def _multiply_bf16(
    start: int,
    end: int,
    x: int,
    num_rows: int,
    in_features: int,
    panels: int,
    scales: int,
    out: int,
    out_stride: int,
    config: int,
) -> None:
    panel_bytes = 2 * PANEL * in_features
    memory = np.empty(PANELS * panel_bytes + _LINE, np.uint8)
    shorts = (memory.ctypes.data + _LINE - 1) // _LINE * _LINE
    last = np.empty((32, UNIT), np.float32)
    amx_begin(config)
    for unit in range(start, end):
        for panel in range(unit * PANELS, (unit + 1) * PANELS):
            panel_to_bf16(
                panels + panel * PANEL * in_features,
                scales + panel * in_features,
                in_features,
                shorts + (panel - unit * PANELS) * panel_bytes,
            )
        row = 0
        while row < num_rows:
            left = num_rows - row
            rows = x + 2 * row * in_features
            target = out + 4 * (row * out_stride + unit * UNIT)
            if left >= 32:
                amx_bf16_32(rows, 2 * in_features, shorts, in_features, target, 4 * out_stride)
            else:
                if left > 16:
                    amx_bf16_32(rows, 2 * in_features, shorts, in_features, last.ctypes.data, 4 * UNIT)
                else:
                    amx_bf16_16(rows, 2 * in_features, shorts, in_features, last.ctypes.data, 4 * UNIT)
                for index in range(left):
                    result = floats(target + 4 * index * out_stride, UNIT)
                    for i in range(UNIT):
                        result[i] = last[index, i]
            row += 32
    amx_end()


def _rows(start: int, end: int, arguments: int) -> None:
    block_int8_matmul_range(start, end, *words_at(arguments, 11))


_kernel = Kernel(_rows)


def block_int8_matmul(x: Activations, weights: BlockPanelWeights, out: Tensor) -> None:
    """Writes `x.dequantize() @ weights` to out, fp32 [num_rows, out_features] with neighbouring columns.

    x: in `input_format`, made by a kernel.
    """
    _kernel(
        weights.out_features // UNIT,
        weights.in_features * UNIT * _NS_PER_WEIGHT,
        (
            x.values.data_ptr(),
            x.scales.data_ptr(),
            x.num_rows,
            x.values.dtype is torch.bfloat16,
            weights.in_features,
            weights.panels.data_ptr(),
            weights.scales.data_ptr(),
            weights.offsets.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            amx_config(),
        ),
    )
