"""`headrace model plan`: what it says of the published entries and of a folder's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infra.cli import app
from infra.model_plan import PUBLISHED, known_models
from schemas.catalog import Catalog
from tests.decoder_files import CONFIGS, make_tensors, write_gguf, write_safetensors

SIZES = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "max_model_len": 256}
RULES = {"bos_token_id": 1, "add_bos": True, "eos_token_ids": [2]}


def plan(models_dir: Path, *arguments: str) -> Result:
    command = ["model", "plan", *arguments, "--models-dir", str(models_dir)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "100"})


def views(result: Result) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return {view["model"]: view for view in map(json.loads, result.stdout.splitlines())}


def test_every_published_model_fits_what_it_is_meant_for(tmp_path: Path) -> None:
    found = views(plan(tmp_path, "--json"))
    assert sorted(found) == ["llama-3.1-70b", "llama-3.1-8b", "qwen3-8b"]
    assert all(view["fits"] and view["device_bytes"] == 80 * 10**9 for view in found.values())
    large = found["llama-3.1-70b"]
    assert (large["tensor_parallel"], large["weight_format"], large["kv_format"]) == (8, "fp8", "fp8")
    assert large["kv_bytes_per_token"] == 160 << 10


def test_published_entries_say_what_their_configs_say() -> None:
    for spec in Catalog.load(PUBLISHED).specs.values():
        if spec.weights:
            config = json.loads((PUBLISHED / spec.id / "config.json").read_text())
            assert (spec.architecture, spec.max_model_len) == (
                config["model_type"],
                config["max_position_embeddings"],
            )
            assert {spec.bos_token_id, *spec.eos_token_ids} <= {*range(config["vocab_size"])}


def test_what_does_not_fit_is_told_with_the_tensor_parallel_degree_that_does(tmp_path: Path) -> None:
    result = plan(tmp_path, "llama-3.1-70b", "--tensor-parallel", "1", "--weight-format", "bf16")
    assert result.exit_code == 1
    assert "it needs TP >= 4" in result.stdout
    assert "llama-3.1-70b: the model does not fit: 141.2 GB of weights, " in result.stderr
    assert result.stderr.endswith("72.0 GB can be used: it needs TP >= 4\n")


def test_a_table_has_a_line_for_each_model(tmp_path: Path) -> None:
    lines = plan(tmp_path).stdout.splitlines()
    assert lines[0].split()[:4] == ["model", "weights", "GPUs", "on"]
    assert [line.split()[0] for line in lines[1:]] == ["llama-3.1-70b", "llama-3.1-8b", "qwen3-8b"]
    assert lines[1].split()[1:8] == ["70.55", "B", "8x80", "GB", "fp8", "9.2", "GB"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no model 'nobody' (there: llama-3.1-70b, llama-3.1-8b, qwen3-8b)"),
        (["qwen3-8b", "--tensor-parallel", "3"], "tensor_parallel 3 does not split 32 heads"),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = plan(tmp_path, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_a_model_of_the_catalogue_is_planned_from_its_folder(tmp_path: Path, family: str, form: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    tensors = make_tensors(CONFIGS[family])
    if form == "gguf":
        path = write_gguf(folder / "model.gguf", CONFIGS[family], tensors)
    else:
        path = write_safetensors(folder, CONFIGS[family], tensors)
    spec = SIZES | RULES | {"id": "mine", "architecture": family, "weights": path.name}
    (folder / "model.json").write_text(json.dumps(spec))
    if form == "safetensors":
        path.unlink()  # the sizes are in config.json
    view = views(plan(tmp_path, "mine", "--memory-gb", "0.1", "--max-num-batched-tokens", "64", "--json"))
    assert view["mine"]["num_parameters"] == sum(array.size for array in tensors.values())
    assert (view["mine"]["max_model_len"], view["mine"]["device_bytes"]) == (256, 100_000_000)
    assert known_models(tmp_path)["mine"] == folder


def test_an_architecture_that_is_not_served_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(SIZES | RULES | {"id": "mine", "architecture": "mamba"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    result = plan(tmp_path, "mine")
    assert result.exit_code == 1
    assert "model_type: 'mamba' is not one of llama, qwen2" in result.stderr
