"""infra/local/environment.sh on a small project: the real script, the real installer, two small packages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.paths import PROJECT_ROOT

INFRA = PROJECT_ROOT / "infra"
SMALL_PYPROJECT = """
[project]
name = "small"
version = "1.0"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
packages = []
"""


def pinned(*packages: str) -> str:
    """The entries of these packages in the real lock, with their hashes."""
    lock = (INFRA / "requirements.lock").read_text()
    entries = [re.search(rf"^{package}==.*\n(?: .*\n)*", lock, re.MULTILINE) for package in packages]
    return "".join(entry[0] for entry in entries if entry)


def run(project: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Sources the script as the commands do, then prints the version of the environment's `six`."""
    command = ". infra/local/environment.sh; .venv/bin/python -c 'import six; print(six.__version__)'"
    return subprocess.run(
        ["sh", "-euc", command],
        cwd=project,
        env={**os.environ, "HEADRACE_PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose environment is made."""
    root = tmp_path_factory.mktemp("project")
    (root / "infra" / "local").mkdir(parents=True)
    shutil.copy(INFRA / "local" / "environment.sh", root / "infra" / "local")
    shutil.copy(INFRA / "requirements-uv.lock", root / "infra")
    (root / "infra" / "requirements.lock").write_text(pinned("setuptools", "six"))
    (root / "pyproject.toml").write_text(SMALL_PYPROJECT)
    made = run(root)
    assert made.returncode == 0, made.stderr
    assert "environment ready" in made.stderr
    return root


def test_the_second_run_is_silent(project: Path) -> None:
    again = run(project)
    assert (again.returncode, again.stderr) == (0, "")


def test_an_interrupted_environment_is_made_anew(project: Path) -> None:
    (project / ".venv" / "unfinished").touch()
    broken = next((project / ".venv" / "lib").rglob("six.py"))
    broken.unlink()  # not written to: the file is shared with the installer's cache
    broken.write_text("half a fi")
    again = run(project)
    assert again.returncode == 0, again.stderr
    assert "making .venv" in again.stderr


def test_an_interpreter_that_is_gone_is_replaced(project: Path) -> None:
    (project / ".venv" / "bin" / "python").unlink()
    again = run(project)
    assert again.returncode == 0, again.stderr
    assert "making .venv" in again.stderr


def test_a_changed_lock_is_installed_and_what_was_added_stays(project: Path) -> None:
    added = next((project / ".venv" / "lib").rglob("six.py")).with_name("added_on_demand.py")
    added.touch()
    lock = project / "infra" / "requirements.lock"
    lock.write_text(lock.read_text() + pinned("idna"))
    again = run(project)
    assert again.returncode == 0, again.stderr
    assert "making .venv" not in again.stderr
    assert list(added.parent.glob("idna"))
    assert added.exists()


def test_a_package_that_is_not_the_pinned_one_fails_with_a_clear_end(project: Path) -> None:
    lock = project / "infra" / "requirements.lock"
    good = lock.read_text()
    lock.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, good) + "idna==3.9\n")
    failed = run(project)
    lock.write_text(good)
    assert failed.returncode == 1
    assert "headrace: installing packages failed (see above)" in failed.stderr
    assert run(project).returncode == 0


def test_a_shim_that_does_not_run_is_passed_over(project: Path, tmp_path: Path) -> None:
    (tmp_path / "shims").mkdir()
    shim = tmp_path / "shims" / "python3.12"
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    good = tmp_path / "good"
    good.mkdir()
    (good / "python3.12").symlink_to(sys.executable)
    shutil.rmtree(project / ".venv")
    path = f"{tmp_path / 'shims'}:{good}:{tools(tmp_path)}"
    made = run(project, HEADRACE_PYTHON="", PATH=path)
    assert made.returncode == 0, made.stderr


def tools(folder: Path) -> Path:
    """What the script uses beside Python, so that PATH can be free of any other."""
    bin_folder = folder / "tools"
    bin_folder.mkdir()
    for name in ("sh", "cat", "sha256sum", "mkdir", "rm", "mv", "df", "awk", "sed", "grep", "flock"):
        found = shutil.which(name)
        assert found, name
        (bin_folder / name).symlink_to(found)
    return bin_folder


def test_without_a_python_that_fits_it_says_what_is_needed(project: Path, tmp_path: Path) -> None:
    old = tmp_path / "old" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    (project / ".venv" / "unfinished").touch()
    failed = run(project, HEADRACE_PYTHON="", PATH=f"{old.parent}:{tools(tmp_path)}")
    assert failed.returncode == 1
    assert failed.stderr == (
        "headrace: found no Python 3.11 or 3.12 on PATH: install one, or set HEADRACE_PYTHON to its path\n"
    )
    failed = run(project, HEADRACE_PYTHON="/no/python")
    assert failed.returncode == 1
    assert "HEADRACE_PYTHON=/no/python does not run or is not Python 3.11 or 3.12" in failed.stderr
