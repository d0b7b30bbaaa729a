"""What models read their weights from, whatever the format of the files."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from workers.weights.closing import Closing
from workers.weights.fp8 import Fp8Matrix
from workers.weights.gguf import GGUFFile


class Tensors(Protocol):
    """Named tensors in open files, read as fp32; only what is asked for is ever touched. A context manager.

    All methods raise WeightsError for a tensor that is not there.
    """

    path: Path

    @property
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def check(self, name: str) -> None:
        """Raises WeightsError where it cannot be decoded, without reading it."""

    def vector(self, name: str) -> Tensor:
        """The whole tensor, in memory of its own. Raises WeightsError when it cannot be decoded."""

    def rows(
        self,
        name: str,
        rows_at_once: int,
        chosen: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Tensor]:
        """A matrix, or its `chosen` rows, in pieces of rows, so that all of it in fp32 is never in memory.

        `chosen` has step 1 and lies within the matrix. What is stored in `dtype` is not converted on the way.
        Raises as `vector`.
        """

    def fp8(self, name: str, rows: range, columns: range | None) -> Fp8Matrix | None:
        """These rows and columns of a matrix as they are stored, None where that is not FP8, or no whole
        blocks of it. Ranges have step 1 and lie within the matrix. Raises as `vector`."""

    def close(self) -> None: ...


class GGUFTensors(Closing):
    """The tensors of a GGUF file, dequantized."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.path
        self._gguf = gguf

    @property
    def names(self) -> Iterable[str]:
        return self._gguf.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._gguf.info(name).shape

    def check(self, name: str) -> None:
        self._gguf.check(name)

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._gguf.dequantize(name))

    def rows(
        self,
        name: str,
        rows_at_once: int,
        chosen: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Tensor]:
        for piece in self._gguf.dequantize_rows(name, rows_at_once, chosen):
            yield torch.from_numpy(piece).to(dtype)

    def fp8(self, name: str, rows: range, columns: range | None) -> Fp8Matrix | None:
        return None

    def close(self) -> None:
        self._gguf.close()
