import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from infra.kernel_cli import app
from kernels.aot import ARCHS


def test_cubins_and_what_each_takes_are_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["aot", "--out", str(tmp_path), "--only", "add_rms_norm"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [*report] == ["sm_80", "sm_90", "sm_100"]
    for arch, kernels in report.items():
        assert [*kernels] == ["fused_add_rms_norm.bf16"]
        assert (tmp_path / arch / "fused_add_rms_norm.bf16.cubin").read_bytes().startswith(b"\x7fELF")
        (takes,) = kernels.values()
        assert [*takes] == ["registers", "shared_bytes", "spill_bytes", "num_warps"]
        assert 0 < takes["registers"] <= 255
        assert takes["spill_bytes"] == 0
        assert arch in done.output


def test_a_kernel_that_takes_more_than_a_device_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHS, "sm_90", dataclasses.replace(ARCHS["sm_90"], shared_bytes=1))
    arguments = ["aot", "--out", str(tmp_path), "--only", "add_rms_norm", "--arch", "sm_90"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "spills, or more shared memory than the device has: sm_90 fused_add_rms_norm.bf16" in done.output
    assert (tmp_path / "report.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "--arch sm_75 is not known; known are sm_80, sm_90, sm_100"),
        (["--only", "nothing"], "--only nothing: no kernel has this in its name"),
    ],
)
def test_what_cannot_be_compiled_is_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["aot", "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 1
    assert message in done.output
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_nothing_is_tuned_without_a_gpu(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "no NVIDIA GPU is here: nothing can be measured" in done.output
    assert not [*tmp_path.iterdir()]
