import dataclasses
import json
from pathlib import Path

import pytest

from schemas.catalog import Canary, Catalog, CatalogError, Deployment, parse_spec

GOOD = {
    "id": "m",
    "architecture": "llama",
    "weights": "model.gguf",
    "tokenizer": "tokenizer.json",
    "max_model_len": 4096,
    "bos_token_id": 1,
    "add_bos": True,
    "eos_token_ids": [2],
}

DEPLOYMENT = {"tensor_parallel": 8, "device_memory_gb": 80, "weight_format": "fp8", "kv_format": "bf16"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": "4096"}, "max_model_len"),
        ({"max_model_len": True}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"eos_token_ids": ["2"]}, "eos_token_ids"),
        ({"eos_token_ids": 2}, "eos_token_ids"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"canary": 3}, "'canary' must be an object with prompt_token_ids and output_token_ids"),
        ({"canary": {"prompt_token_ids": [1]}}, "'canary' must be an object"),
        ({"canary": {"prompt_token_ids": [1], "output_token_ids": []}}, r"'canary\.output_token_ids'"),
        ({"canary": {"prompt_token_ids": [True], "output_token_ids": [1]}}, r"'canary\.prompt_token_ids'"),
        ({"deployment": []}, "'deployment' must be an object with tensor_parallel and device_memory_gb and"),
        (
            {"deployment": DEPLOYMENT | {"tensor_parallel": 0}},
            r"'deployment\.tensor_parallel' must be an int",
        ),
        ({"deployment": DEPLOYMENT | {"device_memory_gb": True}}, r"'deployment\.device_memory_gb'"),
        (
            {"deployment": DEPLOYMENT | {"kv_format": "int4"}},
            r"'deployment\.kv_format' must be one of bf16, fp8",
        ),
        ({"canary": {"prompt_token_ids": [1] * 9, "output_token_ids": [1] * 8}}, "'canary' has 17 tokens"),
    ],
)
def test_a_bad_field_is_named_with_its_file(change: dict[str, object], message: str) -> None:
    with pytest.raises(CatalogError, match=rf"m/model\.json: .*{message}"):
        parse_spec(json.dumps(GOOD | change), "m/model.json")


def test_a_canary_comes_back_as_it_was_written() -> None:
    canary = Canary([1, 2], [3])
    spec = parse_spec(json.dumps(GOOD | {"canary": dataclasses.asdict(canary)}), "f")
    assert spec.canary == canary
    assert parse_spec(json.dumps(dataclasses.asdict(spec)), "f") == spec
    assert parse_spec(json.dumps(GOOD | {"canary": None}), "f").canary is None


def test_a_deployment_comes_back_as_it_was_written() -> None:
    spec = parse_spec(json.dumps(GOOD | {"deployment": DEPLOYMENT}), "f")
    assert spec.deployment == Deployment(8, 80, "fp8", "bf16")
    assert parse_spec(json.dumps(dataclasses.asdict(spec)), "f") == spec


def test_a_missing_field_is_named() -> None:
    with pytest.raises(CatalogError, match="'id' is missing"):
        parse_spec(json.dumps({k: v for k, v in GOOD.items() if k != "id"}), "f")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(CatalogError):
        parse_spec(text, "f")


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.json").write_text(json.dumps(GOOD))
    catalog = Catalog.load(tmp_path)
    assert catalog.on_disk() == ["m"]
    assert catalog.weights_path(catalog.get("m")) == tmp_path / "m" / "model.gguf"
    with pytest.raises(CatalogError, match="there: m, simulated"):
        catalog.get("other")


def test_a_folder_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "model.json").write_text(json.dumps(GOOD))
    with pytest.raises(CatalogError, match="'id' is 'm'"):
        Catalog.load(tmp_path)


def put_model(folder: Path, name: str, tokenizer: str = "{}", **fields: object) -> None:
    (folder / name).mkdir()
    (folder / name / "model.json").write_text(json.dumps({**GOOD, "id": name, **fields}))
    (folder / name / "tokenizer.json").write_text(tokenizer)


def test_fallbacks_read_the_same_prompts(tmp_path: Path) -> None:
    put_model(tmp_path, "big", fallback_models=["small", "tiny"])
    put_model(tmp_path, "small", max_model_len=512, weights="other.gguf")
    put_model(tmp_path, "tiny")
    assert Catalog.load(tmp_path).fallback_models() == {"big": ["small", "tiny"]}


@pytest.mark.parametrize(
    ("fallback", "fields", "message"),
    [
        ("small", {"chat_template": "{{ messages }}"}, "names 'small', which has another chat_template"),
        ("small", {"tokenizer": "", "weights": ""}, "names 'small', which has another tokenizer"),
        ("small", {"eos_token_ids": [3]}, "names 'small', which has another eos_token_ids"),
        ("absent", {}, "no model 'absent'"),
        ("big", {}, "names the model itself"),
    ],
)
def test_a_fallback_that_would_read_other_text_is_refused(
    tmp_path: Path, fallback: str, fields: dict[str, object], message: str
) -> None:
    put_model(tmp_path, "big", fallback_models=[fallback])
    put_model(tmp_path, "small", **fields)  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match=message):
        Catalog.load(tmp_path).fallback_models()


def test_fallbacks_have_the_same_vocabulary_to_the_byte(tmp_path: Path) -> None:
    put_model(tmp_path, "big", fallback_models=["small"])
    put_model(tmp_path, "small", tokenizer='{"a": 1}')
    with pytest.raises(CatalogError, match="another tokenizer"):
        Catalog.load(tmp_path).fallback_models()
    (tmp_path / "small" / "tokenizer.json").unlink()
    with pytest.raises(CatalogError, match=r"small/tokenizer\.json: No such file"):
        Catalog.load(tmp_path).fallback_models()
