import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.file_lock import FileLock, LockedError


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.try_acquire("process 17")
    with pytest.raises(LockedError, match="is locked by process 17"):
        second.try_acquire()
    first.release()
    second.try_acquire("process 18")
    with pytest.raises(LockedError, match="process 18"):
        first.acquire(timeout_s=0.15)
    second.release()


def test_the_note_of_an_earlier_holder_does_not_stay(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    lock.try_acquire("a long note of an earlier holder")
    lock.release()
    with lock.locked("short"), pytest.raises(LockedError) as refused:
        other.try_acquire()
    assert refused.value.holder == "short"


def test_a_child_that_inherits_it_keeps_it(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    lock.try_acquire()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=lock.descriptors,
    )
    try:
        lock.release()
        with pytest.raises(LockedError):
            other.try_acquire()
    finally:
        child.communicate()
    other.try_acquire()
    other.release()


def test_it_is_not_inherited_unasked(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.try_acquire()
    assert not any(os.get_inheritable(descriptor) for descriptor in lock.descriptors)
    lock.release()


def test_an_object_locks_once(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.try_acquire()
    with pytest.raises(RuntimeError, match="already locked"):
        lock.try_acquire()
    lock.release()
    lock.release()
