"""Who else uses the processors while a benchmark measures, and a pause until they are free."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_S = 1.0
# Below it the machine counts as calm: what the benchmark's own idle processes and the system leave.
CALM_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all processors together: passed, spent at work, and spent by a process and its children.

    What another guest of the same host stole from this machine counts as work.
    """

    total: float
    busy: float
    own: float

    def foreign_share_since(self, before: "CpuTimes") -> float:
        """Of all processors' time since `before`, the share that others had: 0 to 1."""
        total = self.total - before.total
        others = (self.busy - before.busy) - (self.own - before.own)
        return min(1.0, max(0.0, others / total)) if total > 0 else 0.0


def cpu_times(pid: int | None = None, proc: Path = _PROC) -> CpuTimes:
    """Now, for `pid` (this process) and its living descendants with the children that they waited for."""
    total, busy = _machine_times((proc / "stat").read_text())
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        seconds[int(stat.parent.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return CpuTimes(
        total, busy, sum(seconds[each] for each in _tree(os.getpid() if pid is None else pid, parents))
    )


def _machine_times(stat: str) -> tuple[float, float]:
    """(total, busy) in seconds from /proc/stat: user nice system idle iowait irq softirq steal."""
    ticks = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    total = sum(ticks)
    return total / _TICKS_PER_S, (total - ticks[3] - ticks[4]) / _TICKS_PER_S


def _tree(root: int, parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root] if root in parents else []
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


async def wait_for_calm(limit_s: float, report: Callable[[str], None]) -> bool:
    """Waits until nobody else uses this machine, at most `limit_s` seconds; False if somebody still does."""
    deadline = time.monotonic() + limit_s
    reported = False
    while True:
        before = cpu_times()
        await asyncio.sleep(_LOOK_S)
        share = cpu_times().foreign_share_since(before)
        if share < CALM_SHARE:
            return True
        if time.monotonic() >= deadline:
            report(f"measuring although others use {share:.0%} of the processors")
            return False
        if not reported:
            report(f"others use {share:.0%} of the processors: waiting up to {limit_s:g} s for calm")
            reported = True
