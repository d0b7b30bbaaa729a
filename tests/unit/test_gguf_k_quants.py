"""Q4_K, Q5_K and Q6_K as they are read, against ggml's own loops over one block (ggml-quants.c)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from workers.weights.gguf import GGUFFile

Values = list[np.float32]
F32 = np.float32


def half(two_bytes: bytes) -> np.float32:
    return F32(np.frombuffer(two_bytes, np.float16)[0])


def scale_and_min(index: int, packed: bytes) -> tuple[int, int]:
    """Eight pairs of six bits in twelve bytes (get_scale_min_k4)."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    return (
        packed[index + 4] & 15 | (packed[index - 4] >> 6) << 4,
        packed[index + 4] >> 4 | (packed[index] >> 6) << 4,
    )


def with_mins(block: bytes, low: bytes, high: Callable[[int, int], int]) -> Values:
    """high(sub, i): the bit above the four of value i of sub-block `sub`."""
    d, d_min, packed = half(block[:2]), half(block[2:4]), block[4:16]
    values: Values = []
    for sub in range(8):
        scale, least = scale_and_min(sub, packed)
        for i in range(32):
            nibble = low[sub // 2 * 32 + i] >> (4 * (sub % 2)) & 15
            values.append(d * F32(scale) * F32(nibble + 16 * high(sub, i)) - d_min * F32(least))
    return values


def q4_k(block: bytes) -> Values:
    return with_mins(block, block[16:], lambda sub, i: 0)


def q5_k(block: bytes) -> Values:
    return with_mins(block, block[48:], lambda sub, i: block[16 + i] >> sub & 1)


def q6_k(block: bytes) -> Values:
    low, high, d = block[:128], block[128:192], half(block[208:])
    scales = np.frombuffer(block[192:208], np.int8)
    values: Values = []
    for value in range(256):
        part, quarter, i = value // 128, value % 128 // 32, value % 32
        nibble = low[part * 64 + quarter % 2 * 32 + i] >> (4 * (quarter // 2)) & 15
        above = high[part * 32 + i] >> (2 * quarter) & 3
        values.append(d * F32(scales[value // 16]) * F32((nibble | above << 4) - 32))
    return values


@pytest.mark.parametrize(("name", "reference"), [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)])
def test_blocks_are_read_as_ggml_reads_them(
    tmp_path: Path, name: str, reference: Callable[[bytes], Values]
) -> None:
    kind = GGMLQuantizationType[name]
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(5)
    raw = random.integers(0, 256, (3, 2 * num_bytes), np.uint8)
    blocks = raw.reshape(-1, num_bytes)
    # The factors of a block: any bytes could be a NaN.
    at = 208 if name == "Q6_K" else 0
    count = 1 if name == "Q6_K" else 2
    factors: npt.NDArray[np.float16] = random.standard_normal((len(blocks), count)).astype(np.float16)
    blocks[:, at : at + 2 * count] = factors.view(np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as gguf:
        assert gguf.tensors["w"].shape == (3, 2 * num_values)
        read = gguf.dequantize("w")
    expected = np.array([reference(block.tobytes()) for block in blocks]).reshape(read.shape)
    np.testing.assert_array_equal(read, expected)
