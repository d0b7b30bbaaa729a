"""Norms, rotary embedding and gated activations, at odd sizes and over rows that are not neighbours."""

import os

import pytest
import torch
from torch import Tensor

from kernels.gated_activation import gelu_and_mul, silu_and_mul
from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rms_norm_ref import fused_add_rms_norm_ref, rms_norm_ref
from kernels.rotary_embedding import rotary_embedding
from kernels.rotary_embedding_ref import cos_sin_cache, rotary_embedding_ref
from kernels.silu_and_mul_ref import silu_and_mul_ref

DTYPES = [(torch.float32, 2e-6, 1e-5), (torch.float16, 2e-3, 2e-3)]
if os.environ.get("TRITON_INTERPRET") != "1":  # which cuts bf16 off where hardware rounds
    DTYPES.append((torch.bfloat16, 1.6e-2, 1.6e-2))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 2).to(dtype)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 640), (7, 33), (3, 5, 16)], ids=str)
def test_rms_norm(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1])
    actual = rms_norm(x.to(device), weight.to(device), 1e-6)
    torch.testing.assert_close(actual.cpu(), rms_norm_ref(x, weight, 1e-6), atol=atol, rtol=rtol)


def test_rms_norm_of_the_heads_of_a_wider_row_with_a_weight_for_each(device: torch.device) -> None:
    x, weight = random(4, 5, 32), random(3, 32)
    actual = rms_norm(x.to(device)[:, 1:4], weight.to(device), 1e-6)
    torch.testing.assert_close(actual.cpu(), rms_norm_ref(x[:, 1:4], weight, 1e-6), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
def test_fused_add_rms_norm(device: torch.device, dtype: torch.dtype, atol: float, rtol: float) -> None:
    x, residual, weight = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype).flip(0), random(96)
    added = residual.to(device).clone()
    actual = fused_add_rms_norm(x.to(device), added, weight.to(device), 1e-5)
    expected = fused_add_rms_norm_ref(x, residual, weight, 1e-5)
    assert torch.equal(added.cpu(), residual)
    torch.testing.assert_close(actual.cpu(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (5, 80), (4, 256)])
def test_rotary_embedding(
    device: torch.device, num_heads: int, head_dim: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    cos_sin = cos_sin_cache(10_000.0, head_dim, 100)[torch.tensor([0, 1, 99])]
    x = random(3, num_heads + 2, head_dim, dtype=dtype)
    actual = rotary_embedding(x.to(device)[:, :num_heads], cos_sin.to(device))
    expected = rotary_embedding_ref(x[:, :num_heads], cos_sin)
    torch.testing.assert_close(actual.cpu(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize("dim", [48, 1025])
def test_gated_activations(
    device: torch.device, dim: int, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    x = random(3, 2 * dim, dtype=dtype)
    for kernel, reference in ((silu_and_mul, silu_and_mul_ref), (gelu_and_mul, gelu_and_mul_ref)):
        torch.testing.assert_close(kernel(x.to(device)).cpu(), reference(x), atol=atol, rtol=rtol)


# As in hardware: 1 / (1 + inf) is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gated_activations_of_large_values_stay_finite(device: torch.device) -> None:
    x = torch.tensor([[-1e4, -30.0, 30.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    for kernel, reference in ((silu_and_mul, silu_and_mul_ref), (gelu_and_mul, gelu_and_mul_ref)):
        torch.testing.assert_close(kernel(x.to(device)).cpu(), reference(x), atol=1e-6, rtol=1e-6)


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    x = random(4, 64).to(device)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        rms_norm(x.T, random(4).to(device), 1e-6)
    with pytest.raises(ValueError, match="weight must be contiguous rows of 64"):
        rms_norm(x, random(63).to(device), 1e-6)
    with pytest.raises(ValueError, match="residual must be contiguous and of x's shape"):
        fused_add_rms_norm(x, random(3, 64).to(device), random(64).to(device), 1e-6)
    with pytest.raises(ValueError, match="cos_sin must be contiguous"):
        rotary_embedding(x.view(4, 1, 64), random(4, 2, 16).to(device))
    with pytest.raises(ValueError, match="63 is odd"):
        silu_and_mul(x[:, :63])
