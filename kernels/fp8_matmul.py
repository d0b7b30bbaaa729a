"""Multiplies with FP8 weights on the GPU; activations stay as they are.

Weights are read as single bytes, which is what a step of few rows takes its time for, and widened in
registers. So results are those of the dequantized matrix, and many rows are no faster than with bf16.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kernels.fp8_matmul_ref import LEAST_K, block_size_k
from kernels.launch import Launch, cdiv, check_rows, kernel, next_power_of_2
from kernels.tuned import Case, tuned_constants

# Neighbouring programs share rows of x in the L2 cache.
_GROUP_M = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut: rows of x, outputs, and inputs at once, of a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tiling(num_rows: int, in_features: int, block: int, element_size: int) -> Tiling:
    """Where `tuned` has none for a device. Not measured: chosen so that nothing spills from compute
    capability 8.9 on."""
    block_k = block_size_k(in_features, block)
    if element_size > 2:  # fp32 multiplies without tensor cores
        return Tiling(16, 32, min(block_k, 32), 4, 1)
    if num_rows <= 16:
        return Tiling(16, 64, block_k, 4, 3)
    if num_rows <= 64:
        return Tiling(64, 64, block_k, 4, 3)
    # With scales by blocks a second sum lies in registers: 128 outputs spill on sm_100.
    return Tiling(128, 128 if block >= in_features else 64, min(block_k, 64), 8, 3)


def tuning_case(num_rows: int, out_features: int, in_features: int, block: int, element_size: int) -> Case:
    """What tilings are measured by: rows as the next power of two, at most 2,048."""
    return {
        "num_rows": min(next_power_of_2(num_rows), 2048),
        "out_features": out_features,
        "in_features": in_features,
        "block": block,
        "element_size": element_size,
    }


def fp8_matmul(x: Tensor, values: Tensor, scales: Tensor, block: int) -> Tensor:
    """As `fp8_matmul_ref`. Raises ValueError for what does not fit, or blocks that cannot be cut."""
    output = torch.empty(len(x), len(values), dtype=x.dtype, device=x.device)
    launch(output, x, values, scales, block).run()
    return output


def launch(
    output: Tensor, x: Tensor, values: Tensor, scales: Tensor, block: int, cut: Tiling | None = None
) -> Launch:
    """What `fp8_matmul` runs: a program for each tile of the output. `cut`: None is the tiling that was
    measured on x's device, or the default."""
    num_rows, in_features = x.shape
    check_rows("x", x)
    if values.shape[1] != in_features or not values.is_contiguous():
        raise ValueError(f"values must be contiguous rows of {in_features}, they are {tuple(values.shape)}")
    num_blocks = cdiv(in_features, block)
    if scales.shape != (len(values), num_blocks) or not scales.is_contiguous():
        raise ValueError(
            f"scales must be contiguous {(len(values), num_blocks)}, they are {tuple(scales.shape)}"
        )
    if not block_size_k(in_features, block):
        raise ValueError(f"blocks of {block} inputs cannot be cut into pieces of {LEAST_K}")
    if cut is None:
        case = tuning_case(num_rows, len(values), in_features, block, x.element_size())
        constants = tuned_constants(x.device, "fp8_matmul", case)
        cut = Tiling(**constants) if constants else tiling(num_rows, in_features, block, x.element_size())
    return Launch(
        _fp8_matmul,
        (cdiv(num_rows, cut.block_m) * cdiv(len(values), cut.block_n),),
        {
            "output": output,
            "x": x,
            "values": values,
            "scales": scales,
            "num_rows": num_rows,
            "x_stride": x.stride(0),
        },
        {
            "OUT_FEATURES": len(values),
            "IN_FEATURES": in_features,
            "NUM_BLOCKS": num_blocks,
            "BLOCK": block,
            "BLOCK_M": cut.block_m,
            "BLOCK_N": cut.block_n,
            "BLOCK_K": cut.block_k,
            "GROUP_M": _GROUP_M,
        },
        cut.num_warps,
        cut.num_stages,
    )


@kernel
def _fp8_matmul(
    output,
    x,
    values,
    scales,
    num_rows,
    x_stride,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    group = program // (GROUP_M * tiles_n)
    rows_of_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    m = (group * GROUP_M + within % rows_of_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // rows_of_group * BLOCK_N + tl.arange(0, BLOCK_N)
    is_m = m < num_rows
    is_n = n < OUT_FEATURES
    x_row = x + m.to(tl.int64)[:, None] * x_stride
    value_row = values + n.to(tl.int64)[None, :] * IN_FEATURES
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < IN_FEATURES
        a = tl.load(x_row + k[None, :], mask=is_m[:, None] & is_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        b = tl.load(value_row + k[:, None], mask=is_n[None, :] & is_k[:, None], other=0.0)
        b = b.to(a.dtype)  # [BLOCK_K, BLOCK_N]
        if NUM_BLOCKS > 1:
            scale = tl.load(scales + n * NUM_BLOCKS + start // BLOCK, mask=is_n, other=0.0)
            acc += tl.dot(a, b, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    if NUM_BLOCKS == 1:
        acc *= tl.load(scales + n, mask=is_n, other=0.0)[None, :]
    place = m.to(tl.int64)[:, None] * OUT_FEATURES + n[None, :]
    tl.store(output + place, acc.to(output.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])
