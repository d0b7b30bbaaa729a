"""A lock that the kernel drops when its last holder dies, so it can never be left behind."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockedError(RuntimeError):
    """Another process holds the lock. `holder` is the note it wrote, perhaps empty."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.path = path
        self.holder = holder


class FileLock:
    """flock on `path`. A child that inherits `descriptors` keeps the lock until it too is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self, note: str = "") -> None:
        """Takes the lock and leaves `note` in the file. Raises LockedError when it is held."""
        if self._descriptor is not None:
            raise RuntimeError(f"{self.path} is already locked by this object")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LockedError(self.path, holder) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)
        self._descriptor = descriptor

    @contextmanager
    def locked(self, note: str = "", timeout_s: float = 0.0) -> Iterator[None]:
        """Holds the lock for a block, after waiting for it (and blocking the thread) up to `timeout_s`."""
        self.acquire(timeout_s, note)
        try:
            yield
        finally:
            self.release()

    def acquire(self, timeout_s: float, note: str = "") -> None:
        """Like `try_acquire`, but waits (and blocks the thread) up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.try_acquire(note)
            except LockedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a child has to inherit to keep the lock; empty while it is not held."""
        return () if self._descriptor is None else (self._descriptor,)

    def release(self) -> None:
        """Gives this process's hold up; no error when there is none."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
