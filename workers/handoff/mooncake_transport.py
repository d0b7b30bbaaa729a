"""Bytes by Mooncake's transfer engine: TCP, or RDMA where the machines have it. Handshakes go peer to peer.

A call returns when the other side has acknowledged what it wrote to its memory, and a receiver takes nothing
for memory that it has not registered (both seen with version 0.3.13). Measured on two busy cores over
loopback: 45 to 70 us for each copy of a call whatever its size, 1 to 2 GB/s for copies of 64 KiB or more.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.handoff.transport import Copy, TransferError

CALL_TIMEOUT_S = 2
# Read once by the library, when it is loaded. Its own limits are 30 s.
_SETTINGS = {
    "MC_TRANSFER_TIMEOUT": str(CALL_TIMEOUT_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(CALL_TIMEOUT_S),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(CALL_TIMEOUT_S),
    "MC_LOG_LEVEL": "ERROR",
}
_PEER_TO_PEER = "P2PHANDSHAKE"


class TransferEngineMissingError(RuntimeError):
    """The transfer engine cannot be loaded; the message says what to install."""


class MooncakeTransport:
    """See `Transport`. One a process: the library's settings are the process's."""

    def __init__(self, host: str, protocol: str = "tcp", devices: str = "") -> None:
        """`host` is the name or address under which the other workers reach this one; `protocol` tcp or rdma;
        `devices` the RDMA devices to use, with commas, empty for all.

        Raises TransferEngineMissingError, TransferError.
        """
        self._engine = _load().TransferEngine()
        if self._engine.initialize(host, _PEER_TO_PEER, protocol, devices):
            raise TransferError(f"the transfer engine did not start on {host} with {protocol}")
        self._segment = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[npt.NDArray[np.uint8]] = []

    @property
    def segment(self) -> str:
        return self._segment

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise TransferError(f"{memory.nbytes} bytes cannot be registered (locked memory? see ulimit -l)")
        self._registered.append(memory)

    def write(self, segment: str, copies: Sequence[Copy]) -> None:
        status = self._engine.batch_transfer_sync_write(
            segment,
            [copy.source for copy in copies],
            [copy.target for copy in copies],
            [copy.length for copy in copies],
        )
        if status:
            raise TransferError(f"{segment}: the transfer engine says {status}")

    def close(self) -> None:
        for memory in self._registered:
            self._engine.unregister_memory(memory.ctypes.data)
        self._registered.clear()


def _load() -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferEngineMissingError(
            f"the transfer engine cannot be loaded: {error}. It needs the RDMA library libibverbs.so.1, for "
            "TCP too: install it (Debian: apt-get install libibverbs1)"
        ) from error
