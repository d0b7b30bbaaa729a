from pathlib import Path

import pytest

from infra.local.gpu import gpu_names, gpu_problem, gpus_of_worker, serving_on, visible_gpus


def test_gpus_are_those_that_the_driver_tells(tmp_path: Path) -> None:
    assert gpu_names(tmp_path / "nobody") == []
    for address, name in (("0000:01:00.0", "NVIDIA H100 80GB HBM3"), ("0000:02:00.0", "NVIDIA L4")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 24\n")
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]


def test_what_the_environment_hides_is_not_used() -> None:
    assert visible_gpus(2, {}) == ["0", "1"]
    assert visible_gpus(8, {"CUDA_VISIBLE_DEVICES": "3, GPU-8932f937"}) == ["3", "GPU-8932f937"]
    assert visible_gpus(8, {"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus(0, {"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_no_two_workers_have_the_same_gpu() -> None:
    gpus = ["0", "1", "4", "5"]
    assert [gpus_of_worker(gpus, slot, 2) for slot in range(2)] == [["0", "1"], ["4", "5"]]


@pytest.mark.parametrize(
    ("names", "device", "deterministic", "line"),
    [
        ([], "auto", False, "no NVIDIA GPU is here: serving on the CPU"),
        (["L4", "L4"], "auto", False, "serving on CUDA (L4, L4)"),
        (["L4"], "cpu", False, "serving on the CPU, as asked, without the GPU that is here (L4)"),
        (["L4"], "auto", True, "serving on the CPU: deterministic mode does not use a GPU (L4)"),
    ],
)
def test_a_stack_says_what_it_serves_on(
    names: list[str], device: str, deterministic: bool, line: str
) -> None:
    assert serving_on(names, device, deterministic=deterministic) == line


def test_gpus_that_do_not_suffice_are_told() -> None:
    assert gpu_problem([], "auto", workers=2, tensor_parallel=1) is None
    assert gpu_problem(["0"], "auto", workers=1, tensor_parallel=1) is None
    assert gpu_problem(["0"], "cpu", workers=4, tensor_parallel=1) is None
    assert gpu_problem([], "cuda", workers=1, tensor_parallel=1) == (
        "--device is cuda, but no NVIDIA GPU is here"
    )
    problem = gpu_problem(["0", "1"], "auto", workers=2, tensor_parallel=2)
    assert problem is not None
    assert problem.startswith("2 workers of 2 ranks need 4 GPUs, and 2 are here")
