import os
import subprocess
import sys
from pathlib import Path

from streams.ledger.folder_lock import FolderLock

HOLD = """
import sys
from pathlib import Path
from streams.ledger.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.try_acquire(7) is None
print("held", flush=True)
sys.stdin.read()
"""


def test_it_says_who_holds_it_and_frees_itself_when_the_holder_dies(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = FolderLock(folder)
        note = lock.try_acquire(1)
        assert note is not None
        assert (note["pid"], note["slot"]) == (holder.pid, 7)
        assert note["since"].endswith("Z")
        holder.kill()
        holder.wait()
        assert lock.try_acquire(1) is None
        other = FolderLock(folder).try_acquire(2)
        assert other is not None
        assert other["pid"] == os.getpid()
        lock.release()
        assert FolderLock(folder).try_acquire(2) is None
    finally:
        holder.kill()
        holder.communicate()


def test_a_note_that_is_just_being_written_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    first = FolderLock(folder)
    first.try_acquire(0)
    first.path.write_bytes(b'{"pid": 1')
    assert FolderLock(folder).try_acquire(1) == {}
    first.release()
