"""A host's clock that is stepped while a process runs, for that process alone: what it reads from `time`.

The monotonic clock, and so every timeout, goes on as it did; C libraries see the host's own clock.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.05


def step_by_file(path: Path) -> None:
    """From now on `time.time` and `time.time_ns` are off by the milliseconds in `path`, while it exists."""
    ahead_ns = _looked_at(path)
    time_ns = time.time_ns
    time.time_ns = lambda: time_ns() + ahead_ns()
    time.time = lambda: time.time_ns() / 1e9


def _looked_at(path: Path) -> Callable[[], int]:
    ahead, look_at = 0, 0.0

    def ahead_ns() -> int:
        nonlocal ahead, look_at
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK_S
            ahead = 0
            with suppress(FileNotFoundError, ValueError):
                ahead = int(path.read_text()) * 1_000_000
        return ahead

    return ahead_ns
