"""Who holds the chDB folder. The engine allows one process; this lock says which, and frees itself."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any


class FolderLock:
    """flock on `<folder>.lock`: the kernel drops it when its holder dies, so it is never left behind."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(folder.name + ".lock")
        self._descriptor: int | None = None

    def try_acquire(self, slot: int) -> dict[str, Any] | None:
        """Takes the lock and returns None, or returns what its holder wrote: pid, slot, since."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _parse(os.pread(descriptor, 1000, 0))
            os.close(descriptor)
            return holder
        note = {
            "pid": os.getpid(),
            "slot": slot,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _parse(note: bytes) -> dict[str, Any]:
    try:
        value = json.loads(note)
    except ValueError:  # the holder is just writing it
        return {}
    return value if isinstance(value, dict) else {}
