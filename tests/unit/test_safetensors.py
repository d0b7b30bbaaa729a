"""Files of safetensors: what is read of them, and what is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.decoder_files import Array, safetensors_bytes
from workers.weights.errors import WeightsError
from workers.weights.safetensors import SafetensorsTensors

SMALL: dict[str, Array] = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(3, np.float16)}


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes: this is not"),
        (b"GGUF" + bytes(20), "header of .* bytes in a file of 24"),
        (safetensors_bytes(SMALL)[:-1], "tensor 'b': .* past the end of the file"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (with_header([]), "not an object"),
        (struct.pack("<Q", 2**63) + bytes(64), "header of 9223372036854775808 bytes in a file of 72"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not JSON: maximum recursion"),
        (
            with_header({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}),
            "'b': its bytes lie over",
        ),
        (
            with_header({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}),
            "'b': its bytes lie over",
        ),
        (
            with_header({"a": entry("F32", [1], 4, 8)}),
            "'a': its bytes lie not right behind those of the header",
        ),
        (with_header({"a": entry("F32", [1], 0, 4)}), "4 bytes behind those of 'a' belong to no tensor"),
        (with_header({"a": entry("F32", [0, 2**70], 0, 0)}), "'a': shape .* is of no tensor"),
        (with_header({"a": entry("F32", [0], 8, 0)}), "-8 bytes for shape"),
        (
            with_header({"a": 1}).replace(b'{"a": 1}', b'{"a": 1,"a": 2}').replace(b"\x08", b"\x0f", 1),
            "'a' is given twice",
        ),
        (with_header({"a": {"dtype": "F32"}}), "tensor 'a': not an object of"),
        (with_header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}), "dtype 'F4' is not supp"),
        (with_header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}), "12 needed"),
        (with_header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}), "not whole numbers"),
    ],
)
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        SafetensorsTensors(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_readable_file(tmp_path: Path, data: st.DataObject) -> None:
    """Neither a crash nor a read outside the file, wherever bytes are changed or cut off."""
    whole = safetensors_bytes(SMALL)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(whole)))])
    try:
        tensors = SafetensorsTensors(path)
    except WeightsError:
        return
    with tensors:
        for name in tensors.names:
            try:
                assert tensors.vector(name).shape == tensors.shape(name)
            except WeightsError:
                continue


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"w": np.zeros((4, 4), np.uint8)}))
    with SafetensorsTensors(path) as tensors, pytest.raises(WeightsError, match="'w': FP8 without w_scale"):
        next(tensors.rows("w", 2))
    path.write_bytes(
        safetensors_bytes({"w": np.zeros((4, 4), np.uint8), "w_scale": np.ones((2, 2), np.float32)})
    )
    with SafetensorsTensors(path) as tensors, pytest.raises(WeightsError, match="no 'weight_block_size'"):
        next(tensors.rows("w", 2))


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_a_matrix_in_pieces_is_the_matrix(tmp_path: Path, rows_at_once: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(SMALL))
    with SafetensorsTensors(path) as tensors:
        pieces = [*tensors.rows("a", rows_at_once)]
    assert all(len(piece) <= rows_at_once for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), SMALL["a"])
