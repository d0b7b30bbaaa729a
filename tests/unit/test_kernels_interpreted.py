"""The Triton kernels' tests in Triton's interpreter, which must be chosen before kernels are decorated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "triton"
FILES = sorted(FOLDER.glob("test_*.py"))
TIMEOUT_S = 600


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_and_models_in_the_interpreter(file: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-q", f"--basetemp={tmp_path / 'inner'}", "-x"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A run that leaves one out tests nothing.
    assert "skipped" not in done.stdout
