import mmap
from pathlib import Path

import pytest

from workers.memory import available_bytes, peak_bytes, resident_bytes

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:   8192 kB\n"}


def v1(folder: str, limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": f"cache 5\ninactive_file 7\ntotal_inactive_file {inactive}\n",
    }


def v2(folder: str, limit: int | str, usage: int, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_without_control_groups_the_host_decides(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, MEMINFO)) == 8 * MIB


def test_a_group_of_version_2_is_a_ceiling(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", 4 * MIB, 3 * MIB, MIB)
    assert available_bytes(write(tmp_path, files)) == 2 * MIB, "file pages can be dropped"


def test_a_group_above_counts_as_well(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", "max", MIB) | v2("/a", 3 * MIB, 2 * MIB)
    assert available_bytes(write(tmp_path, files)) == MIB


def test_a_group_of_version_1_is_a_ceiling(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n"
    files = MEMINFO | {"proc/self/cgroup": lines} | v1("/a", 5 * MIB, 3 * MIB, MIB)
    assert available_bytes(write(tmp_path, files)) == 3 * MIB


def test_in_a_container_the_group_is_at_the_root_of_the_mount(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "4:memory:/not/seen/here\n"} | v1("", 2 * MIB, MIB)
    assert available_bytes(write(tmp_path, files)) == MIB


def test_no_limit_of_version_1_is_no_ceiling(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "4:memory:/\n"} | v1("", 9223372036854771712, MIB)
    assert available_bytes(write(tmp_path, files)) == 8 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/a\n"} | v2("/a", MIB, 2 * MIB)
    assert available_bytes(write(tmp_path, files)) == 0


def test_names_what_the_kernel_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no MemAvailable"):
        available_bytes(write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"}))


def test_this_machine_has_memory() -> None:
    assert 0 < available_bytes() < 1 << 50


def touch(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes) as area:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            area[offset] = 1


def test_a_peak_is_seen_after_it_is_over() -> None:
    before = resident_bytes()
    peak = peak_bytes(lambda: touch(64 * MIB))
    assert resident_bytes() < before + 32 * MIB
    assert 60 * MIB < peak < 96 * MIB


def test_an_earlier_peak_does_not_count() -> None:
    touch(128 * MIB)
    assert peak_bytes(lambda: touch(16 * MIB)) < 64 * MIB


def test_memory_that_is_never_touched_takes_nothing() -> None:
    assert peak_bytes(lambda: mmap.mmap(-1, 256 * MIB).close()) < 32 * MIB
