"""Matrices that stay in FP8 as they are stored, with their scales in one form whatever the file's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """The matrix is values × scales, where a scale is for `block` columns of a row.

    values: FP8 [num_rows, num_columns]; scales: fp32 [num_rows, ceil(num_columns / block)].
    """

    values: Tensor
    scales: Tensor
    block: int

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_rows, num_columns], multiplied in fp32."""
        spread = self.scales.repeat_interleave(self.block, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * spread).to(dtype)


def stacked(matrices: Sequence[Fp8Matrix | None]) -> Fp8Matrix | None:
    """The rows of all as one matrix; None where one is not FP8, or they differ in their form."""
    found = [matrix for matrix in matrices if matrix is not None]
    if len(found) != len(matrices) or len({(each.values.dtype, each.block) for each in found}) != 1:
        return None
    # Torch joins bytes of any kind, but not these numbers.
    values = torch.cat([each.values.view(torch.uint8) for each in found]).view(found[0].values.dtype)
    return Fp8Matrix(values, torch.cat([each.scales for each in found]), found[0].block)
