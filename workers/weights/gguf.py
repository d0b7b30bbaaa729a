"""Reads GGUF files: metadata, tensor table, and one tensor at a time as fp32.

The format is little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):
magic, version, counts, key-value metadata, tensor table, padding, tensor data.
The bytes are mapped, not read: only what is dequantized is ever touched.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.weights.closing import Closing
from workers.weights.gguf_cursor import Cursor, GGUFError, MetadataValue

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_SHORTEST_ENTRY = 13  # bytes: an empty key, its type and a one-byte value


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is row-major (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


@cache
def _has_dequantizer(quantization: GGMLQuantizationType) -> bool:
    """Tried on one block: the package does not say."""
    _, block_bytes = GGML_QUANT_SIZES[quantization]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True


class GGUFFile(Closing):
    """An open GGUF file. Use as a context manager.

    `metadata` maps keys to Python scalars, strings, lists of strings or numpy arrays; `tensors` maps names
    to `TensorInfo` in file order.

    Raises GGUFError when the file is not GGUF, is truncated, has a quantization that is not known, a tensor
    that reaches past its end, or two in one place; OSError when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            head = file.read(8)
            if head[:4] != _MAGIC:
                raise GGUFError(f"{path}: magic: {head[:4]!r} instead of {_MAGIC!r}: this is not a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except BaseException:
            self._data.close()
            raise

    def _parse(self) -> None:
        cursor = Cursor(self._data, self.path)
        cursor.take(4)
        version = cursor.u32()
        if version not in _VERSIONS:
            raise cursor.error(f"GGUF version {version} is not supported (only {_VERSIONS}, little-endian)")
        cursor.field = "tensor count"
        num_tensors = cursor.count(1)
        cursor.field = "metadata count"
        num_metadata = cursor.count(_SHORTEST_ENTRY)

        self.metadata: dict[str, MetadataValue] = {}
        for index in range(num_metadata):
            cursor.field = f"metadata entry {index}"
            key = cursor.string()
            cursor.field = f"metadata {key!r}"
            if key in self.metadata:
                raise cursor.error("given twice")
            self.metadata[key] = cursor.value()

        cursor.field = "metadata 'general.alignment'"
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise cursor.error(f"{alignment!r} is not a positive multiple of 8")

        entries = list(self._tensor_table(cursor, num_tensors))
        data_start = -(-cursor.offset // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, quantization, offset in entries:
            cursor.field = f"tensor {name!r}"
            if name in self.tensors:
                raise cursor.error("given twice")
            if offset % alignment:
                raise cursor.error(f"offset {offset} is not a multiple of the alignment {alignment}")
            block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
            row = shape[-1] if shape else 1
            if row % block_elements:
                raise cursor.error(
                    f"rows of {row} are no multiple of the {block_elements} of a {quantization.name} block"
                )
            num_bytes = prod(shape) // block_elements * block_bytes
            start = data_start + offset
            if start + num_bytes > len(self._data):
                raise cursor.error(
                    f"its bytes {start} to {start + num_bytes} reach past the end of the file "
                    f"({len(self._data)} bytes): it is truncated"
                )
            self.tensors[name] = TensorInfo(name, shape, quantization, start, num_bytes)
        in_order = sorted(self.tensors.values(), key=lambda info: (info.offset, info.num_bytes))
        for before, info in pairwise(in_order):
            if info.offset < before.offset + before.num_bytes:
                cursor.field = f"tensor {info.name!r}"
                raise cursor.error(f"its bytes lie over those of {before.name!r}")

    @staticmethod
    def _tensor_table(
        cursor: Cursor, num_tensors: int
    ) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]:
        for index in range(num_tensors):
            cursor.field = f"tensor entry {index}"
            name = cursor.string()
            cursor.field = f"tensor {name!r}"
            num_dims = cursor.u32()
            if num_dims > _MAX_DIMS:
                raise cursor.error(f"{num_dims} dimensions, at most {_MAX_DIMS} are allowed")
            shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
            number = cursor.u32()
            try:
                quantization = GGMLQuantizationType(number)
            except ValueError:
                raise cursor.error(f"unknown quantization type {number}") from None
            yield name, shape, quantization, cursor.u64()

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as a new fp32 array of its `shape`.

        Raises GGUFError when there is no such tensor or its quantization has no dequantizer.
        """
        return self._dequantize(self.info(name), 0, None).reshape(self.info(name).shape)

    def dequantize_rows(
        self, name: str, rows_at_once: int, chosen: range | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """A matrix, or its `chosen` rows (step 1), in pieces of at most `rows_at_once` rows, so that all of
        it in fp32 is never in memory.

        Raises as `dequantize` does, and GGUFError for a tensor that is not a matrix.
        """
        info = self.info(name)
        if len(info.shape) != 2:
            raise GGUFError(f"{self.path}: tensor {name!r}: shape {info.shape} is not a matrix")
        rows = range(info.shape[0]) if chosen is None else chosen
        for start in rows[::rows_at_once]:
            yield self._dequantize(info, start, min(start + rows_at_once, rows.stop))

    def check(self, name: str) -> None:
        """Raises GGUFError when there is no such tensor or its quantization has no dequantizer."""
        quantization = self.info(name).quantization
        if not _has_dequantizer(quantization):
            raise GGUFError(f"{self.path}: tensor {name!r}: no dequantizer for {quantization.name}")

    def info(self, name: str) -> TensorInfo:
        """The tensor's entry. Raises GGUFError when there is none."""
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: tensor {name!r}: not in the file")
        return info

    def _dequantize(self, info: TensorInfo, start: int, stop: int | None) -> npt.NDArray[np.float32]:
        """Rows `start` to `stop` of the tensor seen as a matrix of its last dimension."""
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        block_elements, block_bytes = GGML_QUANT_SIZES[info.quantization]
        row = info.shape[-1] if info.shape else 1
        rows = raw.reshape(-1, row // block_elements * block_bytes)[start:stop] if info.num_bytes else raw
        self.check(info.name)
        values: npt.NDArray[np.float32] = dequantize(rows, info.quantization)
        # fp32 is not decoded; no array may outlive the mapping.
        return values.copy() if np.may_share_memory(values, raw) else values

    def close(self) -> None:
        """Unmaps the file. `metadata` and `tensors` stay."""
        self._data.close()
