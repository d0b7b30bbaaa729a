"""The plain operations against fp64 formulas written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.rms_norm_ref import rms_norm_ref
from kernels.rotary_embedding_ref import cos_sin_cache, rotary_embedding_ref
from kernels.silu_and_mul_ref import silu_and_mul_ref

DTYPES = [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-2, 1.6e-2)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 2).to(dtype)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 640), (7, 33), (3, 5, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, atol: float, rtol: float) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1])
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    actual = rms_norm_ref(x, weight, 1e-6)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=rtol)


def test_rms_norm_with_a_weight_for_each_head_is_each_head_alone() -> None:
    x, weight = random(4, 3, 32), random(3, 32)
    heads = [rms_norm_ref(x[:, head], weight[head], 1e-6) for head in range(3)]
    assert torch.equal(rms_norm_ref(x, weight, 1e-6), torch.stack(heads, dim=1))


def test_rms_norm_leaves_its_input_alone() -> None:
    x = random(2, 8)
    before = x.clone()
    rms_norm_ref(x, random(8), 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
def test_gated_activations(dtype: torch.dtype, atol: float, rtol: float) -> None:
    x = random(5, 2 * 48, dtype=dtype)
    gate, up = x.double()[:, :48], x.double()[:, 48:]
    gelu = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    silu = gate / (1 + torch.exp(-gate))
    for actual, activated in ((gelu_and_mul_ref(x), gelu), (silu_and_mul_ref(x), silu)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), activated * up, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
def test_rotary_embedding_rotates_each_pair_by_its_angle(
    dtype: torch.dtype, atol: float, rtol: float
) -> None:
    head_dim, base = 16, 10_000.0
    positions = torch.tensor([0, 1, 5, 99])
    x = random(len(positions), 3, head_dim, dtype=dtype)
    actual = rotary_embedding_ref(x, cos_sin_cache(base, head_dim, 100)[positions])
    assert actual.dtype == dtype
    pairs = torch.complex(x.double()[..., :8], x.double()[..., 8:])
    angles = positions.double()[:, None] * base ** (-torch.arange(8, dtype=torch.float64) / 8)
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    # Angles of up to 99 radians have an error of about 1e-5 in fp32.
    torch.testing.assert_close(actual.double(), expected, atol=max(atol, 5e-5), rtol=rtol)


@given(distance=st.integers(0, 400), first=st.integers(0, 3000), second=st.integers(0, 3000))
def test_rotated_dot_products_depend_on_the_distance_alone(distance: int, first: int, second: int) -> None:
    cache = cos_sin_cache(1e6, 32, 3401)
    query, key = random(1, 1, 32), random(1, 1, 32).flip(-1)

    def dot(position: int) -> float:
        rotated = rotary_embedding_ref(
            torch.cat((query, key)), cache[torch.tensor([position + distance, position])]
        )
        return float((rotated[0] * rotated[1]).sum())

    assert dot(first) == pytest.approx(dot(second), abs=2e-2)
