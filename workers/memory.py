"""How much memory this process may still take, and how much a piece of work takes at its peak (Linux)."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")
# A version 1 limit from here on means none: the kernel writes the largest multiple of a page.
_NO_LIMIT = 1 << 62


def available_bytes(root: Path = _ROOT) -> int:
    """What can be allocated before the host or one of this process's control groups is out of memory.

    File pages that the kernel gives up on demand count as available. `root` is where /proc and /sys lie.
    """
    rooms = [_host_available(root), *_cgroup_rooms(root)]
    return max(0, min(rooms))


def peak_bytes(work: Callable[[], None]) -> int:
    """By how much the resident memory of this process grows while `work` runs, at its highest.

    Where the kernel does not let the high-water mark be reset, an earlier peak counts too: never too little.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _own_status("VmRSS")
    work()
    return max(0, _own_status("VmHWM") - before)


def resident_bytes() -> int:
    """The resident memory of this process."""
    return _own_status("VmRSS")


def _own_status(name: str) -> int:
    return _kib_field(Path("/proc/self/status"), name)


def _host_available(root: Path) -> int:
    return _kib_field(root / "proc/meminfo", "MemAvailable")


def _kib_field(path: Path, name: str) -> int:
    """The bytes of a line `name: 123 kB`."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise ValueError(f"{path} has no {name}")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit - use of each group above this process that has a limit, by either version of the interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for group in _with_parents(mounted / "memory", path):
                yield from _room(
                    group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )
        elif not controllers:
            for group in _with_parents(mounted, path):
                yield from _room(group, "memory.max", "memory.current", "inactive_file")


def _with_parents(mounted: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it. In a container only the mount's root may be there."""
    group = mounted / path.lstrip("/")
    yield group
    while group != mounted and mounted in group.parents:
        group = group.parent
        yield group


def _room(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return
    if limit != "max" and int(limit) < _NO_LIMIT:
        yield int(limit) - usage + int(stat.get(reclaimable_name, 0))
