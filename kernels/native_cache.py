"""Where the machine code of compiled kernels is kept, and for how long."""

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_PREFIX = "numba-"
# Each change of a kernel leaves a folder behind. Checkouts may share a parent, so others' folders are judged
# by their age alone: every process marks what it uses when it starts.
_UNUSED_S = 7 * 24 * 3600.0


def folder() -> Path:
    """By the sources that it was made of: numba itself looks at the file of the outer function only, and
    would go on calling what its callees once were."""
    sources = Path(__file__).parent
    digest = sha256()
    for source in sorted(sources.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"{_PREFIX}{digest.hexdigest()[:16]}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / name
    bytecode = sources / "__pycache__"
    if os.access(bytecode if bytecode.exists() else sources, os.W_OK):
        return bytecode / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / name


def use(own: Path, now: float) -> Path:
    """Marks the folder as used at `now` (s of the epoch) and removes those beside it that nobody has used for
    a week; what cannot be written or removed is left as it is. Returns the folder."""
    with suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own, (now, now))
    with suppress(OSError):
        for other in own.parent.glob(f"{_PREFIX}*"):
            if other != own and other.is_dir() and now - other.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
    return own
