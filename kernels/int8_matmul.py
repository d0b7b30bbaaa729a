"""uint8 × int8 matrix products for few rows, with one scale a channel and an fp32 result.

Made for the decodes of a batch, where all is bound by reading the weights: AMX or VNNI instructions, no
packing of activations, scales applied while the sums are in the cache.
"""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activations import SLACK_ROWS, ZERO_POINT, Activations
from kernels.int8_tiles import (
    HAS_AMX,
    HAS_VNNI,
    PANEL,
    PANELS,
    amx_16,
    amx_32,
    amx_begin,
    amx_end,
    vnni_1,
    vnni_2,
    vnni_4,
    vnni_8,
)
from kernels.native import compiled, exact, floats, int32s, words_at
from kernels.team import Kernel

UNIT = PANEL * PANELS  # output channels that are computed together
# Up to so many rows VNNI is as fast as a tile of 16.
_FEW_ROWS = 4
_NS_PER_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class PanelWeights:
    """int8 weights of [out_features, in_features], as `int8_tiles` wants them.

    panels: int8 [out_features / 16, in_features / 4, 16, 4]; scales: fp32 [out_features]; offsets: int32
    [out_features], what the zero point of the activations adds to the sums.
    """

    panels: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def out_features(self) -> int:
        return self.scales.shape[0]

    @property
    def in_features(self) -> int:
        return 4 * self.panels.shape[1]


def supports_panels(out_features: int, in_features: int) -> bool:
    """Whether this processor multiplies such matrices in panels."""
    return HAS_VNNI and out_features % UNIT == 0 and in_features % 64 == 0


def pack_panels(values: Tensor, scales: Tensor) -> PanelWeights:
    """values: int8 [out_features, in_features]; scales: fp32 [out_features]."""
    return PanelWeights(pack_values(values), scales, ZERO_POINT * values.sum(dim=1, dtype=torch.int32))


def pack_values(values: Tensor) -> Tensor:
    """int8 [out_features, in_features] in panels: [out_features / 16, in_features / 4, 16, 4]."""
    out_features, in_features = values.shape
    shape = (out_features // PANEL, in_features // 4, PANEL, 4)
    # Vectors are loaded from multiples of 64 bytes, and torch's memory begins at one.
    panels = torch.empty(shape, dtype=torch.int8)
    panels.copy_(values.view(out_features // PANEL, PANEL, in_features // 4, 4).transpose(1, 2))
    if panels.data_ptr() % 64:
        raise RuntimeError("torch gave memory that does not begin at a multiple of 64 bytes")
    return panels


@cache
def amx_config() -> int:
    """The address of the tiles' configuration, or 0 where the system grants no tiles to this process."""
    if not HAS_AMX or platform.system() != "Linux":
        return 0
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0:
        return 0
    config = _AMX_CONFIG
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = 64  # bytes of a row, for each tile
    config[48:56] = 16  # rows
    return int(config.ctypes.data)


_AMX_CONFIG = np.zeros(64, np.uint8)


@exact
def _scaled(total: Any, channel_scale: Any, row_scale: Any) -> Any:
    """In this order: which two factors go first was else decided anew wherever this is compiled into."""
    return np.float32(np.float32(total * channel_scale) * row_scale)


@compiled
def int8_matmul_range(
    start: int,
    end: int,
    x: int,
    x_scales: int,
    num_rows: int,
    in_features: int,
    panels: int,
    scales: int,
    offsets: int,
    out: int,
    out_stride: int,
    config: int,
) -> None:
    """Units start … end - 1 of 32 output channels: fp32 at `out`, rows `out_stride` values apart.

    x: uint8 [num_rows, in_features] and readable for SLACK_ROWS more; other addresses as in
    `PanelWeights`; config: from `amx_config`.
    """
    sums = np.empty((num_rows + SLACK_ROWS, UNIT), np.int32)
    place = sums.ctypes.data
    tiled = config != 0 and num_rows > _FEW_ROWS
    if tiled:
        amx_begin(config)
    for unit in range(start, end):
        weights = panels + unit * UNIT * in_features
        row = 0
        while tiled and row < num_rows:
            if num_rows - row > 16:
                amx_32(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 32
            else:
                amx_16(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 16
        while row < num_rows:
            left = num_rows - row
            if left >= 8:
                vnni_8(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 8
            elif left >= 4:
                vnni_4(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 4
            elif left >= 2:
                vnni_2(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 2
            else:
                vnni_1(x + row * in_features, in_features, weights, in_features, place + 4 * UNIT * row)
                row += 1
        channel_scales = floats(scales + 4 * unit * UNIT, UNIT)
        channel_offsets = int32s(offsets + 4 * unit * UNIT, UNIT)
        row_scales = floats(x_scales, num_rows)
        for row in range(num_rows):
            result = floats(out + 4 * (row * out_stride + unit * UNIT), UNIT)
            for i in range(UNIT):
                total = np.float32(sums[row, i] - channel_offsets[i])
                result[i] = _scaled(total, channel_scales[i], row_scales[row])
    if tiled:
        amx_end()


def _rows(start: int, end: int, arguments: int) -> None:
    int8_matmul_range(start, end, *words_at(arguments, 10))


_kernel = Kernel(_rows)


def int8_matmul(x: Activations, weights: PanelWeights, out: Tensor) -> None:
    """Writes `x.dequantize() @ weights` to out, fp32 [num_rows, out_features] with neighbouring columns.

    x.values: uint8 in one plane, with SLACK_ROWS more rows of memory behind them.
    """
    _kernel(
        weights.out_features // UNIT,
        weights.in_features * UNIT * _NS_PER_WEIGHT,
        (
            x.values.data_ptr(),
            x.scales.data_ptr(),
            x.num_rows,
            weights.in_features,
            weights.panels.data_ptr(),
            weights.scales.data_ptr(),
            weights.offsets.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            amx_config(),
        ),
    )
