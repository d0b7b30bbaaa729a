"""Matrices of the fast mode: int8 by int8, int8 weights alone, or bf16, as is fastest for the rows at hand.

Our own int8 products have a scale for each 32 inputs of a channel, torch's one for each output channel; int8
activations one for each row. The scale of a row stays beside oneDNN's product (see `kernels.activations`),
so it multiplies with an activation scale of 1.
"""

from enum import StrEnum

import torch
from torch import Tensor

from kernels.activations import ZERO_POINT, Activations, Format
from kernels.block_int8_matmul import BlockPanelWeights, block_int8_matmul, input_format, pack_blocks
from kernels.int8_matmul import PanelWeights, int8_matmul, pack_panels, supports_panels
from kernels.int8_tiles import ONEDNN_HAS_INT8
from kernels.rotate_rows import rotate_rows_
from workers.models.block_quantization import quantize_blocks
from workers.models.layers import Linear


class LinearKind(StrEnum):
    """How a matrix is multiplied. INT8: int8 weights and activations, by our own kernels; INT8_ONEDNN: the
    same by oneDNN; WEIGHT_ONLY: int8 weights, bf16 activations; BF16: both bf16."""

    INT8 = "int8"
    INT8_ONEDNN = "int8_onednn"
    WEIGHT_ONLY = "weight_only"
    BF16 = "bf16"


# Numbers of rows that decide together: one stream, few, many, a prompt chunk.
ROW_BUCKETS = (1, 8, 32, 512)


def row_bucket(num_rows: int) -> int:
    """Index into ROW_BUCKETS: of the first that is not below `num_rows`, or the last."""
    for index, largest in enumerate(ROW_BUCKETS[:-1]):
        if num_rows <= largest:
            return index
    return len(ROW_BUCKETS) - 1


LinearKinds = tuple[LinearKind, ...]  # for each of ROW_BUCKETS


def same_kind(kind: LinearKind) -> LinearKinds:
    """The same for all numbers of rows."""
    return (kind,) * len(ROW_BUCKETS)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [out_features, in_features] to int8 of this shape and fp32 scales [out_features]."""
    scales = weight.abs().amax(dim=1) / 127
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    return (weight * factors[:, None]).round().to(torch.int8), scales


def _quantize_rotated(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_channels` of weights for activations that come rotated."""
    return quantize_channels(rotate_rows_(weight.clone()))


class FastLinear:
    """A matrix without bias. Keeps the layouts that its kinds need and nothing else."""

    def __init__(self, weight: Tensor, kinds: LinearKinds, *, rescored: bool = False) -> None:
        """weight: fp32 [out_features, in_features].

        `rescored`: the largest results are computed again, exactly (see `rescore_logits`). So int8 by int8
        products have one scale a channel and one plane of activations, and oneDNN gives fp32.

        Raises ValueError for INT8 where our kernels cannot (see `supports_panels`), and for INT8_ONEDNN where
        oneDNN has nothing made for this processor.
        """
        self.out_features, self.in_features = weight.shape
        self._kinds = kinds
        self._rescored = rescored
        self.panels: PanelWeights | None = None
        self.blocks: BlockPanelWeights | None = None
        if LinearKind.BF16 in kinds:
            self._float = Linear(weight.to(torch.bfloat16), typical_rows=ROW_BUCKETS[1])
        if LinearKind.INT8 in kinds:
            if not supports_panels(self.out_features, self.in_features):
                raise ValueError(
                    f"no int8 kernel here for a matrix of {self.out_features} x {self.in_features}"
                )
            if rescored:
                self.panels = pack_panels(*_quantize_rotated(weight))
            else:
                values, scales = quantize_blocks(weight)
                self.blocks = pack_blocks(values.flatten(1), scales.flatten(1))
        if LinearKind.WEIGHT_ONLY in kinds or LinearKind.INT8_ONEDNN in kinds:
            values, self._scales = _quantize_rotated(weight)
            if LinearKind.WEIGHT_ONLY in kinds:
                self._values, self._bf16_scales = values, self._scales.to(torch.bfloat16)
            if LinearKind.INT8_ONEDNN in kinds:
                if not ONEDNN_HAS_INT8:
                    raise ValueError("oneDNN multiplies int8 with AVX-512 or AVX-VNNI, which are not here")
                self._packed = torch.ops.onednn.qlinear_prepack(values, None)
                self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)

    def kind(self, num_rows: int) -> LinearKind:
        """How `num_rows` rows are multiplied."""
        return self._kinds[row_bucket(num_rows)]

    def input_format(self, num_rows: int) -> Format:
        """How `num_rows` rows must come."""
        match self.kind(num_rows):
            case LinearKind.INT8 | LinearKind.INT8_ONEDNN if self._rescored:
                return Format.ROTATED_INT8
            case LinearKind.INT8:
                return input_format(num_rows)
            case LinearKind.INT8_ONEDNN:
                return Format.ROTATED_INT8_PAIR
            case LinearKind.WEIGHT_ONLY:
                return Format.ROTATED_BF16
            case LinearKind.BF16:
                return Format.BF16

    def __call__(self, x: Activations, out: Tensor | None = None) -> Activations:
        """x: [num_rows, in_features] in `input_format`, made by a kernel.

        Returns [num_rows, out_features]. Where the kind is INT8 it is written to `out`, if that is given:
        fp32 [num_rows, out_features] with neighbouring columns.
        """
        kind = self.kind(x.num_rows)
        if kind is LinearKind.INT8:
            if out is None:
                out = torch.empty(x.num_rows, self.out_features)
            if self.blocks is not None:
                block_int8_matmul(x, self.blocks, out)
            elif self.panels is not None:
                int8_matmul(x, self.panels, out)
            return Activations(out, _ones(x.num_rows))
        if kind is LinearKind.INT8_ONEDNN:
            product = torch.ops.onednn.qlinear_pointwise(
                x.values,
                1.0,
                ZERO_POINT,
                self._packed,
                self._scales,
                self._zero_points,
                None,
                1.0,
                0,
                torch.float32 if self._rescored else torch.bfloat16,
                "none",
                [],
                "",
            )
        elif kind is LinearKind.WEIGHT_ONLY:
            product = torch.ops.aten._weight_int8pack_mm(x.values, self._values, self._bf16_scales)
        else:
            product = self._float(x.values)
        return Activations(product, x.scales)


_ONES = torch.ones(1024)


def _ones(count: int) -> Tensor:
    return _ONES[:count] if count <= len(_ONES) else torch.ones(count)
