"""Reads one safetensors file, a tensor at a time.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of header length, a header in JSON of
dtype, shape and offsets by tensor, then the data, little-endian and without gaps. The bytes are mapped, not
read: only what is converted is ever touched.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.weights.errors import WeightsError
from workers.weights.strict_json import parse_json

# The reference implementation's limit.
_MAX_HEADER_BYTES = 100_000_000
_LARGEST_SIDE = 2**31 - 1

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """One entry of a header. `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file; `tensors` maps names to entries.

    Raises WeightsError when the header is not JSON of the right form, or a tensor's bytes are not as many as
    its shape takes, reach past the end, or are another's too; OSError when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise WeightsError(f"{path}: {len(head)} bytes: this is not a safetensors file")
            # Read-only: what could be written counts as memory, and a file larger than that is refused.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            (header_bytes,) = struct.unpack("<Q", head)
            if header_bytes > min(_MAX_HEADER_BYTES, len(self._data) - 8):
                raise WeightsError(
                    f"{path}: header of {header_bytes} bytes in a file of {len(self._data)}: it is "
                    "truncated or no safetensors file"
                )
            start = 8 + header_bytes
            self.tensors = dict(self._parse(self._data[8:start], start))
            self._check_layout(start)
        except BaseException:
            self._data.close()
            raise

    def _parse(self, header: bytes, data_start: int) -> Iterator[tuple[str, SafetensorsInfo]]:
        entries = parse_json(header, f"{self.path}: header")
        if not isinstance(entries, dict):
            raise WeightsError(f"{self.path}: the header is not an object")
        for name, entry in entries.items():
            if name != "__metadata__":
                yield name, self._entry(name, entry, data_start)

    def _entry(self, name: str, entry: Any, data_start: int) -> SafetensorsInfo:
        where = f"{self.path}: tensor {name!r}"
        try:
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise WeightsError(f"{where}: not an object of 'dtype', 'shape' and 'data_offsets'") from None
        numbers = (*shape, begin, end)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise WeightsError(f"{where}: shape {shape}, offsets {begin} to {end}: not whole numbers from 0")
        if max(shape, default=0) > _LARGEST_SIDE:
            raise WeightsError(f"{where}: shape {shape} is of no tensor")
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            raise WeightsError(f"{where}: dtype {kind!r} is not supported (known: {', '.join(_DTYPES)})")
        num_bytes = prod(shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise WeightsError(
                f"{where}: {end - begin} bytes for shape {shape} of {kind}: {num_bytes} needed"
            )
        if data_start + end > len(self._data):
            raise WeightsError(
                f"{where}: its bytes reach to {data_start + end} and past the end of the file "
                f"({len(self._data)} bytes): it is truncated"
            )
        return SafetensorsInfo(name, shape, dtype, data_start + begin, num_bytes)

    def _check_layout(self, data_start: int) -> None:
        """That the tensors lie one behind the other and are all there is, as the format has it."""
        reached, before = data_start, "the header"
        for info in sorted(self.tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
            if info.offset != reached:
                how = "over" if info.offset < reached else "not right behind"
                raise WeightsError(
                    f"{self.path}: tensor {info.name!r}: its bytes lie {how} those of {before}"
                )
            reached, before = info.offset + info.num_bytes, repr(info.name)
        if reached != len(self._data):
            raise WeightsError(
                f"{self.path}: {len(self._data) - reached} bytes behind those of {before} belong to no tensor"
            )

    def read(self, info: SafetensorsInfo, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of the tensor, or of rows `start` to `stop`, as it is stored."""
        row_bytes = info.num_bytes // info.shape[0] if info.shape and info.shape[0] else info.num_bytes
        if info.shape:
            stop = min(info.shape[0], info.shape[0] if stop is None else stop)
            shape = (stop - start, *info.shape[1:])
        else:
            shape = ()
        if not prod(shape):
            return torch.empty(shape, dtype=info.dtype)
        # Through bytes: an offset need not be a multiple of the element's size.
        num_bytes = prod(shape) * info.dtype.itemsize
        raw = np.frombuffer(self._data, np.uint8, num_bytes, info.offset + start * row_bytes)
        return torch.from_numpy(raw.copy()).view(info.dtype).view(shape)

    def close(self) -> None:
        self._data.close()
