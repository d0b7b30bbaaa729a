"""What carries bytes from one worker's registered memory to another's. Two do: `MooncakeTransport`, and
`MemoryTransport` for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TransferError(RuntimeError):
    """A call failed, or outlasted its time limit. What it had sent may still land."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` bytes from an address here to an address there."""

    source: int
    target: int
    length: int


class Transport(Protocol):
    """All memory that is written from or to is registered first, by the process that has it."""

    @property
    def segment(self) -> str:
        """The name under which others reach this process's memory."""

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Lets it be read from here and written to by others, until `close`. Raises TransferError."""

    def write(self, segment: str, copies: Sequence[Copy]) -> None:
        """Returns when all of it lies in the other process's memory. Blocks, without holding the GIL, for a
        limited time. Raises TransferError: then some of it may be there, or come."""

    def close(self) -> None:
        """Nobody writes here any more."""
