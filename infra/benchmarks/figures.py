"""Percentiles, and CPU seconds of process groups."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed.

    Raises ValueError when there are none.
    """
    if not values:
        raise ValueError("no values were measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1))]


def cpu_seconds(sessions: Mapping[str, int]) -> dict[str, float]:
    """User and system time so far of all living processes of each session, by the session's name.

    `sessions` is name → session id: the pid of a child of the stack, for each leads a session.
    """
    by_session: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        session, ticks = int(fields[3]), int(fields[11]) + int(fields[12])
        by_session[session] = by_session.get(session, 0.0) + ticks / _TICKS_PER_S
    return {name: by_session.get(session, 0.0) for name, session in sessions.items()}


def resident_bytes(session: int) -> int:
    """Of all living processes of a session, what each has in memory; pages that two share count twice."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session:
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")
