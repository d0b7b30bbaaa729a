"""Reads the header of a GGUF file value by value."""

import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.weights.errors import WeightsError

MetadataValue = bool | int | float | str | list[str] | npt.NDArray[Any]


class GGUFError(WeightsError):
    """The file is not a whole, readable GGUF file. The message names the file and the field."""


class _ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[_ValueType, np.dtype[Any]] = {
    _ValueType.UINT8: np.dtype("<u1"),
    _ValueType.INT8: np.dtype("<i1"),
    _ValueType.UINT16: np.dtype("<u2"),
    _ValueType.INT16: np.dtype("<i2"),
    _ValueType.UINT32: np.dtype("<u4"),
    _ValueType.INT32: np.dtype("<i4"),
    _ValueType.FLOAT32: np.dtype("<f4"),
    _ValueType.BOOL: np.dtype("?"),
    _ValueType.UINT64: np.dtype("<u8"),
    _ValueType.INT64: np.dtype("<i8"),
    _ValueType.FLOAT64: np.dtype("<f8"),
}


class Cursor:
    """A position in the mapped header. Every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0
        self.field = "header"

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {self.field}: {message}")

    def take(self, num_bytes: int) -> int:
        start = self.offset
        if num_bytes > len(self.data) - start:
            raise self.error(
                f"the file ends inside it ({num_bytes} bytes needed at offset {start}, "
                f"{len(self.data)} bytes in the file): it is truncated"
            )
        self.offset = start + num_bytes
        return start

    def u32(self) -> int:
        return int.from_bytes(self.data[self.take(4) : self.offset], "little")

    def u64(self) -> int:
        return int.from_bytes(self.data[self.take(8) : self.offset], "little")

    def count(self, shortest: int) -> int:
        """A number of entries of at least `shortest` bytes; more than the file can hold is an error."""
        count = self.u64()
        if count * shortest > len(self.data) - self.offset:
            raise self.error(f"{count} entries cannot fit into the rest of the file: it is truncated")
        return count

    def string(self) -> str:
        length = self.u64()
        start = self.take(length)
        try:
            return self.data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a string is not UTF-8 ({error})") from error

    def strings(self, count: int) -> list[str]:
        # A vocabulary has 262,144 of them: one local loop without a method call per string.
        data, offset, size = self.data, self.offset, len(self.data)
        read_length = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = offset + 8
            if start > size:
                self.offset = offset
                self.take(8)
            (length,) = read_length(data, offset)
            offset = start + length
            if offset > size:
                self.offset = start
                self.take(length)
            try:
                values.append(data[start:offset].decode())
            except UnicodeDecodeError as error:
                raise self.error(f"string {len(values)} is not UTF-8 ({error})") from error
        self.offset = offset
        return values

    def value_type(self) -> _ValueType:
        number = self.u32()
        try:
            return _ValueType(number)
        except ValueError:
            raise self.error(f"unknown metadata value type {number}") from None

    def value(self) -> MetadataValue:
        value_type = self.value_type()
        if value_type is _ValueType.STRING:
            return self.string()
        if value_type is _ValueType.ARRAY:
            element_type = self.value_type()
            if element_type is _ValueType.ARRAY:
                raise self.error("arrays of arrays are not supported")
            if element_type is _ValueType.STRING:
                return self.strings(self.count(8))
            dtype = _DTYPES[element_type]
            count = self.count(dtype.itemsize)
            return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()
        dtype = _DTYPES[value_type]
        value: bool | int | float = np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize))[0].item()
        return value
