"""Rotary position embedding on the GPU, halves rotated against each other."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import torch
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, check_rows, kernel, next_power_of_2


def rotary_embedding(x: Tensor, cos_sin: Tensor) -> Tensor:
    """As `rotary_embedding_ref`. Raises ValueError where x's heads are not contiguous."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(output, x, cos_sin).run()
    return output


def launch(output: Tensor, x: Tensor, cos_sin: Tensor) -> Launch:
    """What `rotary_embedding` runs: a program for each token, all heads at once."""
    num_tokens, num_heads, head_dim = x.shape
    check_rows("x", x)
    if x.stride(1) != head_dim:
        raise ValueError("x: the heads of a token must be contiguous")
    if cos_sin.shape != (num_tokens, 2, head_dim // 2) or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin must be contiguous {(num_tokens, 2, head_dim // 2)}, it is {tuple(cos_sin.shape)}"
        )
    return Launch(
        _rotary_embedding,
        (num_tokens,),
        {"output": output, "x": x, "cos_sin": cos_sin, "x_stride": x.stride(0)},
        {
            "NUM_HEADS": num_heads,
            "HEADS_PADDED": next_power_of_2(num_heads),
            "HALF": head_dim // 2,
            "HALF_PADDED": next_power_of_2(head_dim // 2),
        },
        num_stages=1,
    )


@kernel
def _rotary_embedding(
    output,
    x,
    cos_sin,
    x_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_PADDED)
    head = tl.arange(0, HEADS_PADDED)
    angle = cos_sin + token * 2 * HALF + i
    cos = tl.load(angle, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    mask = (head < NUM_HEADS)[:, None] & (i < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + i[None, :]  # [HEADS_PADDED, HALF_PADDED]
    row = x + token * x_stride + place
    first = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated = output + token * (NUM_HEADS * 2 * HALF) + place
    element = output.dtype.element_ty
    tl.store(rotated, (first * cos - second * sin).to(element), mask=mask)
    tl.store(rotated + HALF, (second * cos + first * sin).to(element), mask=mask)
