from pathlib import Path

import pytest

from infra.local.gpu import gpu_names, serving_on


def test_gpus_are_those_that_the_driver_tells(tmp_path: Path) -> None:
    assert gpu_names(tmp_path / "nobody") == []
    for address, name in (("0000:01:00.0", "NVIDIA H100 80GB HBM3"), ("0000:02:00.0", "NVIDIA L4")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 24\n")
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ([], "no NVIDIA GPU is here: serving on the CPU"),
        (["L4", "L4"], "serving on the CPU: workers of this version do not use a GPU (L4, L4)"),
    ],
)
def test_a_stack_says_what_it_serves_on(names: list[str], line: str) -> None:
    assert serving_on(names) == line
