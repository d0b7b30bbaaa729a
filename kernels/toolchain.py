"""What Triton needs of a machine with a GPU: it compiles what starts kernels, in C, when it is first used."""

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def launcher_problem(environ: Mapping[str, str], include: Path | None = None) -> str | None:
    """What is missing, and what to do about it; None where nothing is. `include`: where Python's headers lie,
    None for where this Python says."""
    if not environ.get("CC") and not any(
        shutil.which(name, path=environ.get("PATH", "")) for name in ("gcc", "clang")
    ):
        return "kernels for GPUs need a C compiler: install gcc or clang, or name one in CC"
    folder = include or Path(sysconfig.get_paths(scheme="posix_prefix")["include"])
    if not (folder / "Python.h").exists():
        return f"kernels for GPUs need Python's headers: {folder} has no Python.h (Debian: python3-dev)"
    return None
