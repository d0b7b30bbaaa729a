"""Which implementations are chosen, and what `bench kernels` counts."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from infra.benchmarks.kernels import attention_figures, datasheet_of
from kernels.dispatch import PLAIN, Operations, operations
from workers.roofline import DEVICES


def test_the_cpu_has_the_plain_operations() -> None:
    assert operations(torch.device("cpu")) is PLAIN


def test_cuda_has_kernels_that_take_what_their_references_take() -> None:
    chosen = operations(torch.device("cuda"))
    for each in fields(Operations):
        kernel, plain = getattr(chosen, each.name), getattr(PLAIN, each.name)
        assert kernel is not plain
        names = list(inspect.signature(plain).parameters)
        assert list(inspect.signature(kernel).parameters)[: len(names)] == names


def test_to_choose_for_a_cpu_does_not_import_what_compiles_for_gpus() -> None:
    code = (
        "import sys, torch; from kernels.dispatch import operations; operations(torch.device('cpu')); "
        "sys.exit('kernels.launch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_decodes_are_counted_by_the_keys_they_read() -> None:
    figures = attention_figures("llama-8b", [1] * 4, 1000, 2, 1e-3, DEVICES["h100"])
    moved = 2 * 4 * 1000 * 8 * 128 * 2
    assert figures["gb_per_s"] == pytest.approx(moved / 1e6)
    assert figures["hbm_share"] == pytest.approx(moved / 1e-3 / 3.35e12)
    assert figures["tflops"] == pytest.approx(4 * 4 * 1000 * 32 * 128 / 1e9)


def test_prefill_is_counted_by_the_causal_half_and_a_window_by_what_it_sees() -> None:
    whole = attention_figures("llama-8b", [100], 100, 2, 1.0, None)
    assert whole["tflops"] * 1e12 == pytest.approx(4 * (100 * 101 / 2) * 32 * 128)
    assert "hbm_share" not in whole
    window = attention_figures("gemma-270m", [1], 5000, 2, 1.0, None)
    assert window["gb_per_s"] * 1e9 == pytest.approx(2 * 512 * 256 * 2)
    chunk = attention_figures("gemma-270m", [10], 5000, 2, 1.0, None)
    assert chunk["gb_per_s"] * 1e9 == pytest.approx(2 * 521 * 256 * 2)


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("Tesla T4", None)],
)
def test_datasheets_are_found_by_the_drivers_name(name: str, key: str | None) -> None:
    assert datasheet_of(name) is (DEVICES[key] if key else None)
