"""int8 with a scale for each 32 neighbours in a row, as GGUF has them."""

import torch
from torch import Tensor

from kernels.block_int8_tiles import BLOCK

# So many steps is a block's largest value: in int8 and Q8_0, and in Q5_0 (of Q4_0 it is 8: half steps then).
# What was stored in such steps is found again, and nothing is lost.
_FINE_STEPS, _COARSE_STEPS = 127, 16


def quantize_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: fp32 [num_rows, dim]; dim must be a multiple of 32 (ValueError).

    Returns int8 [num_rows, dim / 32, 32] and fp16 scales [num_rows, dim / 32, 1]: each block in the
    steps that lose less.
    """
    if rows.shape[1] % BLOCK:
        raise ValueError(f"rows of {rows.shape[1]} values: no multiple of {BLOCK}")
    blocks = rows.view(len(rows), -1, BLOCK)
    maxima = blocks.abs().amax(dim=2, keepdim=True)
    values, scales, losses = _quantize(blocks, maxima, _FINE_STEPS)
    if losses.any():
        others, other_scales, other_losses = _quantize(blocks, maxima, _COARSE_STEPS)
        better = other_losses < losses
        values = torch.where(better, others, values)
        scales = torch.where(better, other_scales, scales)
    return values.to(torch.int8), scales


def _quantize(blocks: Tensor, maxima: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers in fp32, scales, and for each block the sum of squared errors."""
    scales = (maxima / steps).to(torch.float16)
    step = scales.to(torch.float32)
    values = (blocks * torch.where(step > 0, 1 / step, 0.0)).round_().clamp_(-127, 127)
    losses = (values * step).sub_(blocks).square_().sum(dim=2, keepdim=True)
    return values, scales, losses
