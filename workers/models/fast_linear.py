"""Matrices of the fast mode: int8 by int8, int8 weights alone, or bf16, as is fastest for the rows at hand.

int8 weights have a scale for each output channel, int8 activations one for each row. The scale of a row
stays beside the product (see `kernels.activations`), so oneDNN multiplies with an activation scale of 1.
"""

from enum import StrEnum

import torch
from torch import Tensor

from kernels.activations import ZERO_POINT, Activations
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
        self, weight: Tensor, kinds: LinearKinds, output_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """weight: fp32 [out_features, in_features]. `output_dtype`: bf16 or fp32, of what int8 by int8
        products give; the other kinds give bf16."""
        self.out_features, self.in_features = weight.shape
        self._kinds = kinds
        self._output_dtype = output_dtype
        if LinearKind.BF16 in kinds:
            self._float = Linear(weight.to(torch.bfloat16), typical_rows=ROW_BUCKETS[1])
        if LinearKind.WEIGHT_ONLY in kinds:
            self._values, scales = quantize_channels(weight)
            self._bf16_scales = scales.to(torch.bfloat16)
        if LinearKind.INT8 in kinds:
            # The activations come rotated: so must the weights.
            values, self._scales = quantize_channels(rotate_rows_(weight.clone()))
            self._packed = torch.ops.onednn.qlinear_prepack(values, None)
            self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)

    def input_dtype(self, num_rows: int) -> torch.dtype:
        """What the values of `num_rows` rows must be: uint8 or bf16."""
        kind = self._kinds[row_bucket(num_rows)]
        return torch.uint8 if kind is LinearKind.INT8 else torch.bfloat16

    def __call__(self, x: Activations) -> Activations:
        """x: [num_rows, in_features] of `input_dtype`. Returns [num_rows, out_features]."""
        kind = self._kinds[row_bucket(len(x.values))]
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
                self._output_dtype,
                "none",
                [],
                "",
            )
        elif kind is LinearKind.WEIGHT_ONLY:
            product = torch.ops.aten._weight_int8pack_mm(x.values, self._values, self._bf16_scales)
        else:
            product = self._float(x.values)
        return Activations(product, x.scales)
