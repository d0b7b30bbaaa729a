import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.weights.gguf import GGUFFile
from workers.weights.gguf_cursor import GGUFError

RANDOM = np.random.default_rng(7)
F32 = RANDOM.standard_normal((3, 5), np.float32)
F16 = RANDOM.standard_normal((4, 2), np.float32).astype(np.float16)
Q8 = quantize(RANDOM.standard_normal((6, 64), np.float32), GGMLQuantizationType.Q8_0)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A small file with every kind of metadata that models have, and three quantizations."""
    path = tmp_path / "sample.gguf"
    writer = GGUFWriter(path, "gemma3")
    writer.add_uint32("a.count", 18)
    writer.add_float32("a.epsilon", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["▁the", "", "<0x0A>"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.scores", [-1.0, 0.5])
    writer.add_tensor("f32", F32)
    writer.add_tensor("f16", F16)
    writer.add_tensor("q8", Q8, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_what_was_written(sample: Path) -> None:
    with GGUFFile(sample) as gguf:
        assert gguf.metadata["general.architecture"] == "gemma3"
        assert gguf.metadata["a.count"] == 18
        assert gguf.metadata["a.epsilon"] == 0.5
        assert gguf.metadata["a.flag"] is True
        assert gguf.metadata["a.texts"] == ["▁the", "", "<0x0A>"]
        np.testing.assert_array_equal(gguf.metadata["a.numbers"], [1, 2, 3])
        np.testing.assert_array_equal(gguf.metadata["a.scores"], [-1.0, 0.5])
        assert {name: info.shape for name, info in gguf.tensors.items()} == {
            "f32": (3, 5),
            "f16": (4, 2),
            "q8": (6, 64),
        }
        arrays = {name: gguf.dequantize(name) for name in gguf.tensors}
    # The file is closed: arrays own their memory.
    np.testing.assert_array_equal(arrays["f32"], F32)
    np.testing.assert_array_equal(arrays["f16"], F16.astype(np.float32))
    np.testing.assert_array_equal(arrays["q8"], dequantize(Q8, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 6, 100])
@pytest.mark.parametrize("name", ["f32", "f16", "q8"])
def test_a_matrix_in_pieces_is_the_matrix(sample: Path, name: str, rows_at_once: int) -> None:
    with GGUFFile(sample) as gguf:
        pieces = list(gguf.dequantize_rows(name, rows_at_once))
        whole = gguf.dequantize(name)
    assert all(len(piece) <= rows_at_once for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def replace_once(data: bytearray, old: bytes, new: bytes) -> None:
    assert data.count(old) == 1
    index = data.index(old)
    data[index : index + len(old)] = new


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


Q8_ENTRY = text("q8") + struct.pack("<IQQ", 2, 64, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: replace_once(d, b"GGUF", b"GGML"), "magic: b'GGML' .* not a GGUF file"),
        (lambda d: struct.pack_into("<I", d, 4, 99), "version 99 is not supported"),
        (lambda d: struct.pack_into("<Q", d, 8, 1 << 60), "tensor count: .* truncated"),
        (lambda d: struct.pack_into("<Q", d, 16, 1 << 60), "metadata count: .* truncated"),
        (
            lambda d: replace_once(
                d, text("a.count") + struct.pack("<I", 4), text("a.count") + struct.pack("<I", 77)
            ),
            "'a.count': unknown metadata value type 77",
        ),
        (lambda d: replace_once(d, b"a.epsilon", b"a.epsi\xff\xffn"), "not UTF-8"),
        (lambda d: replace_once(d, b"a.scores", b"a.number"), None),
        (
            lambda d: replace_once(d, Q8_ENTRY + struct.pack("<I", 8), Q8_ENTRY + struct.pack("<I", 250)),
            "tensor 'q8': unknown quantization type 250",
        ),
        (
            lambda d: replace_once(d, Q8_ENTRY, text("q8") + struct.pack("<IQQ", 2, 64, 1 << 40)),
            "tensor 'q8': its bytes .* past the end",
        ),
        (
            lambda d: replace_once(d, Q8_ENTRY, text("q8") + struct.pack("<IQQ", 2, 63, 6)),
            "tensor 'q8': rows of 63",
        ),
        (
            lambda d: replace_once(d, Q8_ENTRY[:14], text("q8") + struct.pack("<I", 9)),
            "tensor 'q8': 9 dimensions",
        ),
        (lambda d: d.__delitem__(slice(len(d) - 64, None)), "past the end of the file"),
        (
            lambda d: replace_once(
                d, Q8_ENTRY + struct.pack("<IQ", 8, 96), Q8_ENTRY + struct.pack("<IQ", 8, 32)
            ),
            "tensor 'f16': its bytes lie over those of 'q8'|tensor 'q8': its bytes lie over those of",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_field(
    sample: Path, change: Callable[[bytearray], None], message: str | None
) -> None:
    edit(sample, change)
    if message is None:  # another key is no fault: this only shows that the edits as such are readable
        with GGUFFile(sample) as gguf:
            assert "a.number" in gguf.metadata
        return
    with pytest.raises(GGUFError, match=message) as error:
        GGUFFile(sample)
    assert str(sample) in str(error.value)


def test_a_tensor_that_is_not_there_is_named(sample: Path) -> None:
    with GGUFFile(sample) as gguf, pytest.raises(GGUFError, match=r"'blk\.0\.attn_q\.weight': not in"):
        gguf.dequantize("blk.0.attn_q.weight")


def test_an_empty_file_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(GGUFError, match="not a GGUF file"):
        GGUFFile(tmp_path / "empty")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_readable_file(sample: Path, data: st.DataObject) -> None:
    """Neither a crash nor a read outside the file, wherever bytes are changed or cut off."""
    whole = sample.read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = sample.with_name("damaged.gguf")
    path.write_bytes(damaged[: data.draw(st.integers(1, len(whole)))])
    try:
        gguf = GGUFFile(path)
    except GGUFError:
        return
    with gguf:
        for name, info in gguf.tensors.items():
            array: npt.NDArray[np.float32] | None = None
            try:
                with np.errstate(all="ignore"):
                    array = gguf.dequantize(name)
            except GGUFError:
                continue
            assert array.shape == info.shape
