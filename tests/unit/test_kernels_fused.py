"""The compiled passes between two matrix products, each against its plain reference."""

import pytest
import torch
from torch import Tensor

from kernels.activations import PLANE_RATIO, Activations, Format
from kernels.add_rms_norm import add_rms_norm
from kernels.add_rms_norm_ref import add_rms_norm_ref
from kernels.gelu_and_mul_quantize import gelu_and_mul_quantize
from kernels.gelu_and_mul_quantize_ref import gelu_and_mul_quantize_ref
from kernels.qk_norm_rope_cache import qk_norm_rope_cache
from kernels.qk_norm_rope_cache_ref import qk_norm_rope_cache_ref
from kernels.quantize_rows import quantize_rows
from kernels.quantize_rows_ref import quantize_rows_ref
from kernels.rotary_embedding_ref import cos_sin_cache
from kernels.rotate_rows import rotate_rows_
from kernels.rotate_rows_ref import rotate_rows_ref, rotation_group

# Rows on one thread and on the team; dims with whole groups of 128, smaller ones, and none.
SHAPES = [(1, 640), (3, 96), (5, 33), (33, 2048), (300, 640)]
# A value that lies between two steps may round to either.
TOLERANCE = {torch.uint8: 1.1, torch.bfloat16: 0.0, torch.float32: 0.0}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2).to(dtype)


def scaled(num_rows: int, dim: int, planes: int) -> Activations:
    """What a matrix gives: bf16 planes with a scale for each row, or with `planes` 0 plain fp32."""
    if not planes:
        return Activations(random(num_rows, dim), torch.ones(num_rows))
    values = random(planes * num_rows, dim, dtype=torch.bfloat16)
    return Activations(values, random(num_rows).abs() + 0.1)


def assert_same(actual: Activations, expected: Activations) -> None:
    assert actual.values.dtype == expected.values.dtype
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-5, atol=0)
    difference = actual.values.float() - expected.values.float()
    if actual.planes == 2:  # a step more in the one is 254 less in the other
        difference = (actual.dequantize() - expected.dequantize()) / expected.scales[:, None] * PLANE_RATIO
    tolerance = TOLERANCE[actual.values.dtype]
    if tolerance:
        assert difference.abs().max() <= tolerance
        assert (difference.abs() > 0.5).float().mean() < 0.01
    else:
        torch.testing.assert_close(actual.values.float(), expected.values.float(), rtol=1e-2, atol=1e-5)
    spread = expected.dequantize().square().mean().sqrt()
    relative_rmse = ((actual.dequantize() - expected.dequantize()).square().mean().sqrt() / spread).item()
    print(f"{actual.values.dtype}: relative RMSE {relative_rmse:.1e}, max {difference.abs().max():.1e}")
    assert relative_rmse < 2e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation(shape: tuple[int, int]) -> None:
    x = random(*shape)
    expected = rotate_rows_ref(x)
    torch.testing.assert_close(rotate_rows_(x.clone()), expected, rtol=1e-5, atol=1e-5)
    # Orthogonal and its own inverse; products stay what they were.
    torch.testing.assert_close(rotate_rows_ref(expected), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected @ expected.T, x @ x.T, rtol=1e-3, atol=1e-2)


def test_rotation_takes_outliers_out() -> None:
    assert rotation_group(640) == rotation_group(2048) == 128
    assert rotation_group(96) == 32
    assert rotation_group(33) == 1
    x = random(4, 640)
    x[:, 77] = 300.0
    rotated = rotate_rows_ref(x)
    assert rotated.abs().max() < 50


def test_rotation_refuses_what_it_cannot_change_in_place() -> None:
    for x in (random(4, 128).T, random(4, 128, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="contiguous fp32"):
            rotate_rows_(x)


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_rows(shape: tuple[int, int], source: torch.dtype, form: Format) -> None:
    x = random(*shape, dtype=source)
    before = x.clone()
    assert_same(quantize_rows(x, form), quantize_rows_ref(x, form))
    assert torch.equal(x, before)


def test_a_row_of_zeros_is_zero_and_not_nan() -> None:
    quantized = quantize_rows(torch.zeros(2, 640), Format.ROTATED_INT8)
    expected = quantize_rows_ref(torch.zeros(2, 640), Format.ROTATED_INT8)
    for each in (quantized, expected):
        assert torch.equal(each.dequantize(), torch.zeros(2, 640))


def test_a_second_plane_makes_rows_exact_to_16_bits() -> None:
    x = random(7, 640)
    for form, error in ((Format.ROTATED_INT8, 2e-2), (Format.ROTATED_INT8_PAIR, 8e-5)):
        found = rotate_rows_ref(quantize_rows(x, form).dequantize()) - x
        relative_rmse = (found.square().mean() / x.square().mean()).sqrt()
        assert error / 10 < relative_rmse < error


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(number: float) -> None:
    x = random(1, 640)
    x[0, 5] = number
    assert not torch.isfinite(quantize_rows(x, Format.ROTATED_INT8).dequantize()).any()


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("planes", [None, 0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape: tuple[int, int], planes: int | None, form: Format) -> None:
    branch = None if planes is None else scaled(*shape, planes)
    weights = random(shape[1]), random(shape[1]).flip(0)
    actual_hidden, expected_hidden = random(*shape), random(*shape)
    actual = add_rms_norm(actual_hidden, branch, *weights, 1e-6, form)
    assert_same(actual, add_rms_norm_ref(expected_hidden, branch, *weights, 1e-6, form))
    torch.testing.assert_close(actual_hidden, expected_hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("planes", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_mul_quantize(shape: tuple[int, int], planes: int, form: Format) -> None:
    x = scaled(shape[0], 2 * shape[1], planes)
    assert_same(gelu_and_mul_quantize(x, form), gelu_and_mul_quantize_ref(x, form))


@pytest.mark.parametrize("planes", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)], ids=str)
def test_qk_norm_rope_cache(heads: tuple[int, int], num_tokens: int, planes: int) -> None:
    num_heads, num_kv_heads = heads
    head_dim, block_size = 64, 16
    qkv = scaled(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, planes)
    qk_norm = random(num_heads + num_kv_heads, head_dim)
    cos_sin = cos_sin_cache(10_000.0, head_dim, 500)
    generator = torch.Generator().manual_seed(num_tokens)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    slots = torch.randperm(20 * block_size, generator=generator)[:num_tokens]
    keys, values = (random(20, block_size, num_kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    keys_ref, values_ref = keys.clone(), values.clone()
    actual = qk_norm_rope_cache(qkv, qk_norm, cos_sin, positions, slots, keys, values, 1e-6)
    expected = qk_norm_rope_cache_ref(qkv, qk_norm, cos_sin, positions, slots, keys_ref, values_ref, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(keys, keys_ref, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(values, values_ref, rtol=0, atol=0)
