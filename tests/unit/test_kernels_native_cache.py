"""Old machine code goes; what others may use, and what is no cache of ours, stays."""

import os
from pathlib import Path

import numba

import kernels.native  # noqa: F401  (sets numba's folder)
from kernels import native_cache

NOW, DAY = 1_800_000_000.0, 86_400.0


def made(path: Path, age_days: float) -> Path:
    path.mkdir()
    (path / "kernel.nbc").write_bytes(b"code")
    os.utime(path, (NOW - age_days * DAY,) * 2)
    return path


def test_what_nobody_used_for_a_week_is_removed(tmp_path: Path) -> None:
    own = made(tmp_path / "numba-own", 30)
    old, lately = made(tmp_path / "numba-old", 8), made(tmp_path / "numba-lately", 6)
    foreign, file = made(tmp_path / "foreign", 100), tmp_path / "numba-file"
    file.touch()
    os.utime(file, (0, 0))
    assert native_cache.use(own, NOW) == own
    assert not old.exists()
    assert all(path.exists() for path in (own / "kernel.nbc", lately / "kernel.nbc", foreign, file))
    # It was used now: a week from now it is of use still.
    assert native_cache.use(tmp_path / "numba-new", NOW + 6 * DAY).is_dir()
    assert own.exists()


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    assert native_cache.use(blocker / "numba-own", NOW) == blocker / "numba-own"


def test_numba_has_the_folder_of_these_sources() -> None:
    assert str(native_cache.folder()) == numba.config.CACHE_DIR  # type: ignore[attr-defined]
