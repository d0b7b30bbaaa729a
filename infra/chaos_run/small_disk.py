"""A disk that can be filled: a tmpfs of a few MiB."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(place: Path, size_mib: int) -> Iterator[Path | None]:
    """Makes the folder `place` such a disk; None where this user may mount nothing."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(filler: Path) -> None:
    """Writes the file `filler` until its disk is full."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
