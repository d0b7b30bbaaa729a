"""`infra/test` itself: what it passes on, and that it fails when a test leaves a process behind."""

import os
import subprocess
from pathlib import Path

import pytest

from infra.local.paths import PROJECT_ROOT

LEAVES_A_PROCESS = """
import subprocess
def test_leaves_a_process():
    nowhere = subprocess.DEVNULL
    left = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=nowhere, stderr=nowhere)
    print("left", left.pid)
    left.returncode = 0  # no warning from the object: the process is to be found by the command
"""


def infra_test(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [PROJECT_ROOT / "infra" / "test", *arguments, "-p", "no:cacheprovider"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def test_file(tmp_path: Path) -> Path:
    return tmp_path / "test_it.py"


def test_arguments_go_to_pytest_and_its_status_comes_back(test_file: Path) -> None:
    test_file.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    assert infra_test(str(test_file), "-k", "good").returncode == 0
    failed = infra_test(str(test_file), "-k", "bad")
    assert failed.returncode == 1
    assert "infra/test: FAILED at stage: pytest" in failed.stderr


def test_a_process_that_is_left_behind_is_a_failure(test_file: Path) -> None:
    test_file.write_text(LEAVES_A_PROCESS)
    done = infra_test(str(test_file), "-s")
    left = int(done.stdout.split("left ")[1].split()[0])
    os.kill(left, 9)
    assert done.returncode == 1
    assert f"process {left} still runs: sleep 60" in done.stdout
    assert "FAILED at stage: nothing left running" in done.stderr
