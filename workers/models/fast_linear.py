"""Matrices of the fast mode: int8 by int8, int8 weights alone, or bf16, as is fastest for the rows at hand.

int8 weights have a scale for each output channel, int8 activations one for each row. The scale of a row
stays beside the product (see `kernels.activations`), so oneDNN multiplies with an activation scale of 1.
"""

from enum import StrEnum

import torch
from torch import Tensor

from kernels.activations import ZERO_POINT, Activations, Format
from kernels.rotate_rows import rotate_rows_
from workers.models.layers import Linear


class LinearKind(StrEnum):
    """How a matrix is multiplied. INT8: int8 weights and activations; WEIGHT_ONLY: int8 weights, bf16
    activations; BF16: both bf16."""

    INT8 = "int8"
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


class FastLinear:
    """A matrix without bias. Keeps the layouts that its kinds need and nothing else."""

    def __init__(
        self,
        weight: Tensor,
        kinds: LinearKinds,
        *,
        int8_format: Format = Format.ROTATED_INT8_PAIR,
        int8_output: torch.dtype = torch.bfloat16,
    ) -> None:
        """weight: fp32 [out_features, in_features]. int8 by int8 products take `int8_format` and give
        `int8_output`, bf16 or fp32; the others take and give bf16."""
        self.out_features, self.in_features = weight.shape
        self._kinds = kinds
        self._formats = {
            LinearKind.INT8: int8_format,
            LinearKind.WEIGHT_ONLY: Format.ROTATED_BF16,
            LinearKind.BF16: Format.BF16,
        }
        self._int8_output = int8_output
        if LinearKind.BF16 in kinds:
            self._float = Linear(weight.to(torch.bfloat16), typical_rows=ROW_BUCKETS[1])
        if {LinearKind.INT8, LinearKind.WEIGHT_ONLY} & set(kinds):
            # The activations come rotated: so must the weights.
            values, self._scales = quantize_channels(rotate_rows_(weight.clone()))
            if LinearKind.WEIGHT_ONLY in kinds:
                self._values, self._bf16_scales = values, self._scales.to(torch.bfloat16)
            if LinearKind.INT8 in kinds:
                self._packed = torch.ops.onednn.qlinear_prepack(values, None)
                self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)

    def input_format(self, num_rows: int) -> Format:
        """How `num_rows` rows must come."""
        return self._formats[self._kinds[row_bucket(num_rows)]]

    def __call__(self, x: Activations) -> Activations:
        """x: [num_rows, in_features] in `input_format`. Returns [num_rows, out_features]."""
        kind = self._kinds[row_bucket(x.num_rows)]
        if kind is LinearKind.INT8:
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
                self._int8_output,
                "none",
                [],
                "",
            )
        elif kind is LinearKind.WEIGHT_ONLY:
            product = torch.ops.aten._weight_int8pack_mm(x.values, self._values, self._bf16_scales)
        else:
            product = self._float(x.values)
        return Activations(product, x.scales)
