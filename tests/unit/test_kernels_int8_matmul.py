"""The int8 product against the same numbers multiplied in fp64: integer sums, so nearly exact."""

import pytest
import torch

from kernels.activations import Format
from kernels.int8_matmul import int8_matmul, pack_panels, supports_panels
from kernels.quantize_rows import quantize_rows

needs_vnni = pytest.mark.skipif(not supports_panels(32, 64), reason="this processor has no AVX-512 VNNI")


@needs_vnni
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("shape", [(32, 64), (96, 640), (640, 192)], ids=str)
def test_product(shape: tuple[int, int], num_rows: int) -> None:
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(num_rows)
    weights = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(out_features, generator=generator)
    x = quantize_rows(torch.randn(num_rows, in_features, generator=generator) * 3, Format.ROTATED_INT8)
    # Into some columns of wider rows, whose other columns must stay.
    wide = torch.full((num_rows, out_features + 8), 7.0)
    int8_matmul(x, pack_panels(weights, scales), wide[:, 4:-4])
    expected = (x.dequantize().double() @ weights.double().T * scales.double()).float()
    torch.testing.assert_close(wide[:, 4:-4], expected, rtol=1e-4, atol=1e-3)
    assert (wide[:, :4] == 7).all()
    assert (wide[:, -4:] == 7).all()


@needs_vnni
def test_largest_sums_do_not_overflow() -> None:
    weights = torch.full((32, 2048), -127, dtype=torch.int8)
    x = quantize_rows(torch.eye(1, 2048), Format.ROTATED_INT8)
    x.values.fill_(255)
    out = torch.empty(1, 32)
    int8_matmul(x, pack_panels(weights, torch.ones(32)), out)
    torch.testing.assert_close(out, torch.full((1, 32), -127.0 * 127 * 2048) * x.scales)


def test_what_does_not_fill_a_unit_is_not_supported() -> None:
    assert not supports_panels(33, 640)
    assert not supports_panels(64, 65)
