"""A table of embeddings in int8, of which single rows are looked up."""

from dataclasses import dataclass

import torch
from torch import Tensor

# As in GGUF's Q8_0, which is so stored without a loss. With one scale a row the table alone adds 0.003 to
# the KL divergence from full precision, as much as the activations of all layers.
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockQuantizedTable:
    """values: int8 [num_rows, dim / 32, 32]; scales: fp32 [num_rows, dim / 32, 1]."""

    values: Tensor
    scales: Tensor

    def rows(self, indices: Tensor) -> Tensor:
        """fp32 [len(indices), dim]. indices: int64. Raises IndexError for one out of range."""
        return (self.values.index_select(0, indices) * self.scales.index_select(0, indices)).flatten(1)


def quantize_table(rows: Tensor) -> BlockQuantizedTable:
    """rows: fp32 [num_rows, dim]; dim must be a multiple of 32 (ValueError)."""
    if rows.shape[1] % _BLOCK:
        raise ValueError(f"embeddings of {rows.shape[1]} values: no multiple of {_BLOCK}")
    blocks = rows.view(len(rows), -1, _BLOCK)
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    return BlockQuantizedTable((blocks * factors).round().to(torch.int8), scales)
