"""Products with FP8 weights against the reference, by rows and by blocks, at sizes that fill no tile."""

import os

import pytest
import torch
from torch import Tensor

from kernels.fp8_matmul import fp8_matmul
from kernels.fp8_matmul_ref import fp8_matmul_ref
from kernels.launch import FP8

DTYPES = [(torch.float32, 1e-4, 1e-5), (torch.float16, 2e-2, 2e-3)]
if os.environ.get("TRITON_INTERPRET") != "1":  # whose bf16 is wrong
    DTYPES.append((torch.bfloat16, 1.6e-1, 1.6e-2))


def operands(num_rows: int, shape: tuple[int, int], block: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, shape[1] + 8, generator=generator).to(dtype)[:, : shape[1]]
    values = (torch.randn(shape, generator=generator) * 4).to(FP8)
    scales = torch.rand(shape[0], -(-shape[1] // block), generator=generator) + 0.1
    return x, values, scales


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "shape", "block"),
    [(1, (96, 64), 64), (3, (70, 80), 48), (17, (33, 200), 128), (150, (130, 48), 32)],
    ids=str,
)
def test_products_are_those_of_the_dequantized_matrix(
    device: torch.device,
    num_rows: int,
    shape: tuple[int, int],
    block: int,
    dtype: torch.dtype,
    atol: float,
    rtol: float,
) -> None:
    x, values, scales = operands(num_rows, shape, block, dtype)
    actual = fp8_matmul(x.to(device), values.to(device), scales.to(device), block).cpu()
    expected = fp8_matmul_ref(x, values, scales, block)
    print(f"max {(actual.float() - expected.float()).abs().max().item():.2e}")
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    x, values, scales = (each.to(device) for each in operands(2, (32, 64), 32, torch.float32))
    with pytest.raises(ValueError, match="values must be contiguous rows of 32"):
        fp8_matmul(x[:, :32], values, scales, 32)
    with pytest.raises(ValueError, match="scales must be contiguous"):
        fp8_matmul(x, values, scales[:, :1], 32)
    with pytest.raises(ValueError, match="blocks of 24 inputs"):
        fp8_matmul(x, values, torch.ones(32, 3, device=device), 24)
