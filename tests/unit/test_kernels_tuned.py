"""Measured constants: what is written is what is found again, and nothing is taken from another device."""

import json
from pathlib import Path

import pytest
import torch

from kernels import tuned
from kernels.tuned import Measured, TunedTable, file_name, read_table, tuned_constants, tuning_note

TABLE = TunedTable(
    "NVIDIA H100 80GB HBM3",
    "2026-11-30",
    {"torch": "2.13.0"},
    (
        Measured(
            "paged_attention",
            {"head_dim": 128, "decode": True},
            {"block_m": 16, "tile": 128},
            10.5,
            12.25,
        ),
    ),
)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / file_name(TABLE.device)
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    path.write_text(TABLE.to_json())
    assert read_table(path) == TABLE


def test_constants_are_for_one_case_of_one_kernel() -> None:
    assert TABLE.find("paged_attention", {"head_dim": 128, "decode": True}) == {"block_m": 16, "tile": 128}
    assert TABLE.find("paged_attention", {"head_dim": 128, "decode": False}) is None
    assert TABLE.find("fp8_matmul", {"head_dim": 128, "decode": True}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"device": "x", "entries": [{}]})])
def test_a_broken_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: not a table of tuned constants"):
        read_table(path)


def test_a_device_without_a_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.table_of.cache_clear()
    assert "no kernel constants were measured on NVIDIA L4" in tuning_note("NVIDIA L4")
    (tmp_path / file_name(TABLE.device)).write_text(TABLE.to_json())
    assert tuning_note(TABLE.device) == (
        "1 kernel constants are as measured on NVIDIA H100 80GB HBM3 on 2026-11-30"
    )
    tuned.table_of.cache_clear()


def test_without_a_gpu_the_defaults_hold() -> None:
    assert tuned_constants(torch.device("cpu"), "paged_attention", {"head_dim": 128}) is None


def test_tables_that_come_along_are_of_the_devices_that_they_name() -> None:
    for path in tuned.FOLDER.glob("*.json"):
        table = read_table(path)
        assert path.name == file_name(table.device)
        assert all(entry.us <= entry.default_us for entry in table.entries)
