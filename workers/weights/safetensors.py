"""The tensors of a model in safetensors files: one, or the shards that an index lists, as fp32."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from workers.weights.closing import Closing
from workers.weights.errors import WeightsError
from workers.weights.fp8 import Fp8Matrix
from workers.weights.safetensors_file import SafetensorsFile, SafetensorsInfo
from workers.weights.strict_json import parse_json

INDEX_SUFFIX = ".safetensors.index.json"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FP8)


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

    def check(self, name: str) -> None:
        _, info = self._find(name)
        if info.dtype in _FP8:
            self._find_scales(self._find_matrix(name)[1])

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
        name, rows, columns = self._find_scales(info)
        file, scale = self._find(name)
        values = file.read(scale).float()
        return _Scales(values.view(-(-info.shape[0] // rows), -1), rows, columns)

    def _find_scales(self, info: SafetensorsInfo) -> tuple[str, int, int]:
        """Their name, and of how many rows and columns each is.

        Raises WeightsError when there are none, or of another shape than the matrix asks for.
        """
        name = next((each for each in scale_names(info.name) if each in self._tensors), None)
        if name is None:
            raise WeightsError(
                f"{self.path}: tensor {info.name!r}: FP8 without {' or '.join(scale_names(info.name))}"
            )
        _, scale = self._find(name)
        num_rows, num_columns = info.shape
        if prod(scale.shape) == 1:
            return name, num_rows, num_columns
        if scale.shape in ((num_rows,), (num_rows, 1)):
            return name, 1, num_columns
        block = self._block_shape
        if block is not None and scale.shape == (-(-num_rows // block[0]), -(-num_columns // block[1])):
            return name, *block
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
    index = parse_json(path.read_bytes(), str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: field 'weight_map' is not an object of file names by tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(
                f"{path}: field 'weight_map.{name}': {file_name!r} is not a file name beside it"
            )
    return weight_map
