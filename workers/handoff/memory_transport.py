"""A transport inside one process, for tests: real bytes, and whatever faults a test wants."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from workers.handoff.transport import Copy, TransferError


class Fault(Enum):
    """Of one copy: it fails before or after its bytes have landed; or it returns well, and nothing landed, or
    one bit is wrong."""

    NONE = "none"
    FAILS = "fails"
    FAILS_LANDED = "fails, landed"
    LOST = "lost"
    FLIPPED = "flipped"


@dataclass(eq=False)
class MemoryNetwork:
    """Segments by name. `fault` is asked for every copy, in the writer's thread: it may also wait."""

    fault: Callable[[Copy], Fault] = lambda copy: Fault.NONE
    segments: dict[str, "MemoryTransport"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, segment: str) -> "MemoryTransport":
        """A transport of that name. Raises ValueError if there is one."""
        with self.lock:
            if segment in self.segments:
                raise ValueError(f"segment {segment} is there already")
            transport = self.segments[segment] = MemoryTransport(self, segment)
        return transport


class MemoryTransport:
    """See `Transport`."""

    def __init__(self, network: MemoryNetwork, segment: str) -> None:
        self._network = network
        self._segment = segment
        self._registered: list[npt.NDArray[np.uint8]] = []

    @property
    def segment(self) -> str:
        return self._segment

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        self._registered.append(memory)

    def write(self, segment: str, copies: Sequence[Copy]) -> None:
        there = self._network.segments.get(segment)
        for copy in copies:
            self._check(copy.source, copy.length, "here")
            fault = self._network.fault(copy)
            if there is None or fault is Fault.FAILS:
                raise TransferError(f"{segment} is not reached")
            there._check(copy.target, copy.length, "there")
            if fault is not Fault.LOST:
                ctypes.memmove(copy.target, copy.source, copy.length)
            if fault is Fault.FLIPPED:
                ctypes.c_uint8.from_address(copy.target).value ^= 1
            if fault is Fault.FAILS_LANDED:
                raise TransferError(f"{segment} did not answer")

    def close(self) -> None:
        with self._network.lock:
            self._network.segments.pop(self._segment, None)
        self._registered.clear()

    def _check(self, address: int, length: int, where: str) -> None:
        for memory in self._registered:
            begin = memory.ctypes.data
            if begin <= address and address + length <= begin + memory.nbytes:
                return
        raise TransferError(f"{length} bytes at {address:#x} are not registered {where}")
