"""The objects that a job's output or error file consists of, as one life of a coordinator writes them. Pure.

An object cannot be added to. So the last part of this life is written again, with the lines that came since,
until it is large enough; then the next one begins. What a state does not speak of yet is written over or is
never read: who comes after a crash begins a part of its own.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from schemas.records import BatchPart

# The last part is written again each second: a larger one is more memory and more to write.
PART_BYTES = 1 << 20


class PartWrite(NamedTuple):
    """`data` is all of part `number`."""

    number: int
    data: bytes


class JobParts:
    def __init__(self, parts: Iterable[BatchPart], epoch: int) -> None:
        """`parts`: what the state has of earlier lives; `epoch`: of this life, no other has it."""
        self._closed = [BatchPart(part.epoch, part.size) for part in parts]
        self._epoch = epoch
        self._last = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes in memory."""
        return len(self._last)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(part.size for part in self._closed) + len(self._last)

    def append(self, lines: Sequence[bytes]) -> list[PartWrite]:
        """What is to be written for them, before `parts` may be told to anyone."""
        writes = []
        for line in lines:
            self._last += line
            if len(self._last) >= PART_BYTES:
                writes.append(PartWrite(len(self._closed), bytes(self._last)))
                self.close()
        if self._last and lines:
            writes.append(PartWrite(len(self._closed), bytes(self._last)))
        return writes

    def close(self) -> None:
        """Nothing more comes to the last part: its memory is free. Only what is written may be closed."""
        if self._last:
            self._closed.append(BatchPart(self._epoch, len(self._last)))
            self._last = bytearray()

    def parts(self) -> list[BatchPart]:
        last = [BatchPart(self._epoch, len(self._last))] if self._last else []
        return [BatchPart(part.epoch, part.size) for part in self._closed] + last
