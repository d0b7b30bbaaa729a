"""The product with a scale for each block, against the same numbers multiplied in fp64."""

import pytest
import torch

from kernels.activations import Format
from kernels.block_int8_matmul import block_int8_matmul, input_format, pack_blocks
from kernels.block_int8_tiles import HAS_AMX_BF16
from kernels.int8_matmul import amx_config, supports_panels
from kernels.quantize_rows import quantize_rows

needs_vnni = pytest.mark.skipif(not supports_panels(32, 64), reason="this processor has no AVX-512 VNNI")
needs_amx = pytest.mark.skipif(
    not (HAS_AMX_BF16 and amx_config()), reason="this processor has no AMX: all rows are multiplied as int8"
)
FORMS = [
    pytest.param(Format.INT8_PAIR, 2e-6, marks=needs_vnni),
    # Weights become bf16: an error of at most 2⁻⁹ each, and some of them cancel in a sum.
    pytest.param(Format.BF16, 4e-3, marks=needs_amx),
]


@pytest.mark.parametrize(("form", "error"), FORMS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("shape", [(32, 64), (96, 640), (640, 192)], ids=str)
def test_product(shape: tuple[int, int], num_rows: int, form: Format, error: float) -> None:
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    values[0, :4] = torch.tensor([-128, -127, 127, 0])
    scales = (torch.rand(out_features, in_features // 32, generator=generator) + 1e-3).to(torch.float16)
    weights = values.double() * scales.double().repeat_interleave(32, 1)
    x = quantize_rows(torch.randn(num_rows, in_features, generator=generator) * 3, form)
    # Into some columns of wider rows, whose other columns must stay.
    wide = torch.full((num_rows, out_features + 8), 7.0)
    block_int8_matmul(x, pack_blocks(values, scales), wide[:, 4:-4])
    expected = x.dequantize().double() @ weights.T
    for row in range(num_rows):
        lost = (wide[row, 4:-4] - expected[row]).norm() / expected[row].norm()
        assert lost <= error, f"row {row}"
    assert (wide[:, :4] == 7).all()
    assert (wide[:, -4:] == 7).all()


@needs_vnni
def test_largest_sums_do_not_overflow() -> None:
    values = torch.full((32, 2048), -127, dtype=torch.int8)
    x = quantize_rows(torch.ones(1, 2048), Format.INT8_PAIR)
    x.values.fill_(255)
    out = torch.empty(1, 32)
    block_int8_matmul(x, pack_blocks(values, torch.ones(32, 64, dtype=torch.float16)), out)
    torch.testing.assert_close(out, torch.full((1, 32), -127.0 * 127 * (1 + 1 / 254) * 2048) * x.scales)


@needs_amx
def test_weights_round_to_the_nearest_bf16() -> None:
    values = torch.arange(-127, 129, dtype=torch.int16).clamp(max=127).to(torch.int8)
    scales = torch.tensor([1e-3, 0.37, 2.1, 1 / 3, 0.1, 7.3, 0.0123, 0.7]).to(torch.float16)
    weights = values.view(8, 32).double() * scales.double()[:, None]
    # One row for each weight of a channel, with a one in its place.
    out = torch.empty(256, 32)
    block_int8_matmul(
        quantize_rows(torch.eye(256), Format.BF16),
        pack_blocks(values.repeat(32, 1), scales.repeat(32, 1)),
        out,
    )
    torch.testing.assert_close(out[:, 5], weights.flatten().to(torch.bfloat16).float(), rtol=0, atol=0)


@needs_vnni
def test_many_rows_come_as_bf16_where_there_is_amx() -> None:
    assert input_format(1) is Format.INT8_PAIR
    assert input_format(512) is (Format.BF16 if HAS_AMX_BF16 and amx_config() else Format.INT8_PAIR)
