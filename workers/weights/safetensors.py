"""Reads safetensors files: one, or the shards that an index lists, a tensor at a time as fp32.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of header length, a header in JSON of
dtype, shape and offsets by tensor, then the data, little-endian and without gaps. The bytes are mapped, not
read: only what is converted is ever touched.
"""

import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.weights.closing import Closing
from workers.weights.errors import WeightsError
from workers.weights.fp8 import Fp8Matrix

INDEX_SUFFIX = ".safetensors.index.json"
# The reference implementation's limit.
_MAX_HEADER_BYTES = 100_000_000

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
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FP8)


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
    its shape takes or reach past the end; OSError when the file cannot be opened.
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
        except BaseException:
            self._data.close()
            raise

    def _parse(self, header: bytes, data_start: int) -> Iterator[tuple[str, SafetensorsInfo]]:
        try:
            entries = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self.path}: the header is not JSON: {error}") from None
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


class SafetensorsTensors(Closing):
    """The tensors of a file or of all shards of an index.

    FP8 matrices are multiplied with the scales beside them (`scale_of`): one for the tensor, one a row, or
    one for each block of `block_shape` (rows, columns), as `weight_block_size` in config.json says it.
    """

    def __init__(self, path: Path, block_shape: tuple[int, int] | None = None) -> None:
        """path: `*.safetensors` or `*.safetensors.index.json`.

        Raises WeightsError for an index or file that is broken, a shard that is missing, or a tensor that is
        not in the shard that the index names; OSError when a file cannot be opened.
        """
        self.path = path
        self._block_shape = block_shape
        self._files: list[SafetensorsFile] = []
        self._tensors: dict[str, tuple[SafetensorsFile, SafetensorsInfo]] = {}
        try:
            if path.name.endswith(INDEX_SUFFIX):
                self._open_shards(_weight_map(path))
            else:
                file = self._open(path)
                self._tensors = {name: (file, info) for name, info in file.tensors.items()}
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> SafetensorsFile:
        for file in self._files:
            if file.path == path:
                return file
        file = SafetensorsFile(path)
        self._files.append(file)
        return file

    def _open_shards(self, weight_map: dict[str, str]) -> None:
        for name, file_name in weight_map.items():
            try:
                file = self._open(self.path.with_name(file_name))
            except FileNotFoundError:
                raise WeightsError(f"{self.path}: the file {file_name} is missing beside it") from None
            info = file.tensors.get(name)
            if info is None:
                raise WeightsError(f"{self.path}: tensor {name!r} is not in {file_name}")
            self._tensors[name] = (file, info)

    @property
    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def vector(self, name: str) -> Tensor:
        file, info = self._find(name)
        if info.dtype in _FP8:
            return torch.cat([*self.rows(name, max(1, info.shape[0]))])
        return file.read(info).float()

    def rows(
        self,
        name: str,
        rows_at_once: int,
        chosen: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Tensor]:
        file, info = self._find_matrix(name)
        scales = self._fp8_scales(info) if info.dtype in _FP8 else None
        rows = range(info.shape[0]) if chosen is None else chosen
        for start in rows[::rows_at_once]:
            values = file.read(info, start, min(start + rows_at_once, rows.stop))
            if scales is not None:
                values = values.float() * _of_rows(scales, start, start + len(values), info.shape[1])
            yield values.to(dtype)

    def fp8(self, name: str, rows: range, columns: range | None) -> Fp8Matrix | None:
        file, info = self._find_matrix(name)
        if info.dtype not in _FP8:
            return None
        scales = self._fp8_scales(info)
        kept = range(info.shape[1]) if columns is None else columns
        of_rows = scales.values[torch.arange(rows.start, rows.stop) // scales.rows]
        block = len(kept)
        if of_rows.shape[1] > 1:
            block = scales.columns
            if kept.start % block:
                return None
            of_rows = of_rows[:, kept.start // block : -(-kept.stop // block)]
        values = file.read(info, rows.start, rows.stop)[:, kept.start : kept.stop]
        return Fp8Matrix(values.contiguous(), of_rows.contiguous(), block)

    def _find_matrix(self, name: str) -> tuple[SafetensorsFile, SafetensorsInfo]:
        file, info = self._find(name)
        if len(info.shape) != 2:
            raise WeightsError(f"{self.path}: tensor {name!r}: shape {info.shape} is not a matrix")
        return file, info

    def _find(self, name: str) -> tuple[SafetensorsFile, SafetensorsInfo]:
        found = self._tensors.get(name)
        if found is None:
            raise WeightsError(f"{self.path}: tensor {name!r}: not in the file")
        if found[1].dtype not in _READABLE:
            raise WeightsError(f"{self.path}: tensor {name!r}: {found[1].dtype} is no dtype of weights")
        return found

    def _fp8_scales(self, info: SafetensorsInfo) -> "_Scales":
        """Raises WeightsError when there are none, or of another shape than the matrix asks for."""
        name = next((each for each in scale_names(info.name) if each in self._tensors), None)
        if name is None:
            raise WeightsError(
                f"{self.path}: tensor {info.name!r}: FP8 without {' or '.join(scale_names(info.name))}"
            )
        file, scale = self._find(name)
        values = file.read(scale).float()
        num_rows, num_columns = info.shape
        if values.numel() == 1:
            return _Scales(values.view(1, 1), num_rows, num_columns)
        if scale.shape in ((num_rows,), (num_rows, 1)):
            return _Scales(values.view(num_rows, 1), 1, num_columns)
        block = self._block_shape
        if block is not None and scale.shape == (-(-num_rows // block[0]), -(-num_columns // block[1])):
            return _Scales(values, *block)
        asked = f"blocks of {block[0]} x {block[1]}" if block else "no 'weight_block_size' in config.json"
        raise WeightsError(
            f"{self.path}: tensor {name!r}: shape {scale.shape} fits neither the tensor, its {num_rows} "
            f"rows, nor {asked}"
        )

    def close(self) -> None:
        for file in self._files:
            file.close()


def scale_names(name: str) -> tuple[str, str]:
    """What the scales of an FP8 tensor are called in compressed-tensors and in DeepSeek's files. Both are
    multiplied with, in spite of the second name."""
    return f"{name}_scale", f"{name}_scale_inv"


@dataclass(frozen=True, slots=True)
class _Scales:
    """values[i, j] is for rows i * rows … and columns j * columns …"""

    values: Tensor
    rows: int
    columns: int


def _of_rows(scales: _Scales, start: int, stop: int, num_columns: int) -> Tensor:
    """The scales of rows `start` to `stop` spread out: [stop - start, 1 or num_columns]."""
    chosen = scales.values[torch.arange(start, stop) // scales.rows]
    if chosen.shape[1] == 1:
        return chosen
    return chosen.repeat_interleave(scales.columns, dim=1)[:, :num_columns]


def _weight_map(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: field 'weight_map' is not an object of file names by tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(
                f"{path}: field 'weight_map.{name}': {file_name!r} is not a file name beside it"
            )
    return weight_map
