"""Finds libibverbs, which the KV transfer engine is linked to also where it uses TCP, or gets Debian's."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.local.file_lock import FileLock
from infra.local.paths import cache_dir

LIBRARY = "libibverbs.so.1"
_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_TIMEOUT_S = 120


class VerbsError(RuntimeError):
    """The library is not there and cannot be got; the message says what to do."""


def ensure_verbs(env: Mapping[str, str], report: Callable[[str], None]) -> dict[str, str]:
    """`env` for a process that loads the transfer engine: as it is where the system has the library, else
    with a folder of Debian's packages, unpacked and not installed, which needs no root.

    Raises VerbsError.
    """
    if _is_installed():
        return dict(env)
    root = cache_dir(env) / "verbs"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock").locked(timeout_s=_TIMEOUT_S):
        if not (root / "complete").exists():
            report(f"getting {LIBRARY} from Debian's packages")
            _unpack(root)
            (root / "complete").touch()
    folders = sorted({str(path.parent) for path in root.rglob("*.so.*")})
    if known := env.get("LD_LIBRARY_PATH"):
        folders.append(known)
    return {**env, "LD_LIBRARY_PATH": os.pathsep.join(folders)}


def _is_installed() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def _unpack(root: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise VerbsError(
                f"{LIBRARY} is missing: install rdma-core's libibverbs (no {tool} here to get it)"
            )
    packages = root / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir()
    download = ["apt-get", "download", "-qq", *_PACKAGES]
    try:
        if subprocess.run(download, cwd=packages, capture_output=True, timeout=_TIMEOUT_S).returncode:
            # A fresh container has no package lists, and only root can fetch them.
            _run(["apt-get", "update", "-qq"], packages)
            _run(download, packages)
        for package in sorted(packages.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(root / "files")], packages)
    except subprocess.TimeoutExpired as error:
        raise VerbsError(f"{error.cmd} took longer than {_TIMEOUT_S} s; check the network") from error


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise VerbsError(
            f"{' '.join(command)}: {done.stderr.strip()[-500:]}; install it: apt-get install libibverbs1"
        )
