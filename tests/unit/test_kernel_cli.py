from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from infra.kernel_cli import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_nothing_is_tuned_without_a_gpu(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "no NVIDIA GPU is here: nothing can be measured" in done.output
    assert not [*tmp_path.iterdir()]
