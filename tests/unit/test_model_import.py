"""A model's files become a catalogue entry that says what they say, or an error and nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner

from infra.cli import app
from infra.model_import import import_model
from schemas.catalog import Catalog, CatalogError
from schemas.models import LoadedModel
from tests.bpe_files import ADDED, add_tokenizer, published, trained
from tests.decoder_files import CONFIGS, VOCAB_SIZE, make_tensors, write_gguf, write_safetensors
from workers.models.open_weights import open_weights

# One more token, those that stand for themselves and two of padding make it as large as the small models'.
TRAINED = VOCAB_SIZE - 1 - len(ADDED) - 2
TEMPLATE = (
    '{{ bos_token }}{% if tools %}{{ tools | tojson }}<tool_call>\n{"name": "x"}{% endif %}'
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)


def ids() -> dict[str, int]:
    vocab, _ = trained(TRAINED)
    return {token: len(vocab) + index for index, token in enumerate(ADDED)}


def gguf(folder: Path, kind: str = "llama-bpe", **more: Any) -> Path:
    def add(writer: GGUFWriter) -> None:
        add_tokenizer(writer, kind, TRAINED)
        writer.add_chat_template(more.get("template", TEMPLATE))
        writer.add_bos_token_id(ids()["<|begin|>"])
        writer.add_eos_token_id(more.get("eos", ids()["<|end|>"]))
        if "add_bos" in more:
            writer.add_add_bos_token(more["add_bos"])

    config = CONFIGS["llama"]
    return write_gguf(folder / "tiny.gguf", config, make_tensors(config), add=add)


def hugging_face(folder: Path, **changes: Any) -> Path:
    source = folder / "source"
    source.mkdir()
    config = CONFIGS["llama"] | {"bos_token_id": ids()["<|begin|>"], "eos_token_id": ids()["<tool_call>"]}
    write_safetensors(source, config, make_tensors(config), 2)
    files = {
        "tokenizer.json": published("llama-bpe", TRAINED).to_str(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "eos_token": {"content": "<|end|>"}}),
        "generation_config.json": json.dumps({"eos_token_id": [ids()["<tool_call>"], ids()["<|end|>"]]}),
        "model.json": "{}",
    }
    for name, text in (files | changes).items():
        (source / name).write_text(text) if text is not None else (source / name).unlink(missing_ok=True)
    return source


def loaded(models_dir: Path, name: str) -> LoadedModel:
    catalog = Catalog.load(models_dir)
    open_weights(catalog.weights_path(catalog.get(name))).close()
    return LoadedModel.load(catalog, name)


@pytest.mark.parametrize("make", [gguf, hugging_face])
def test_an_imported_model_reads_messages_as_its_files_say(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    spec = import_model(make(tmp_path), tmp_path / "models", "tiny")
    model = loaded(tmp_path / "models", "tiny")
    assert dataclasses.replace(spec, chat_template="", tool_call_format="") == dataclasses.replace(
        model.spec, chat_template="", tool_call_format=""
    )
    assert (spec.architecture, spec.max_model_len) == ("llama", 512)
    assert (spec.bos_token_id, spec.eos_token_ids[0]) == (ids()["<|begin|>"], ids()["<|end|>"])
    assert model.takes_tools
    assert model.chat_template is not None
    encoded = model.chat_template.encode([{"role": "user", "content": "Kafka is"}])
    text = published("llama-bpe", TRAINED).encode("Kafka is").ids
    assert encoded == [ids()["<|begin|>"], *text, ids()["<|end|>"]]
    assert model.tokenizer.encode_prompt("Kafka is") == [
        *([spec.bos_token_id] if spec.add_bos else []),
        *text,
    ]


def test_weights_are_linked_and_no_catalogue_sees_half_an_entry(tmp_path: Path) -> None:
    source = gguf(tmp_path)
    import_model(source, tmp_path / "models", "tiny")
    folder = tmp_path / "models" / "tiny"
    assert (folder / "model.gguf").readlink() == source
    assert sorted(path.name for path in folder.iterdir()) == ["model.gguf", "model.json", "tokenizer.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("llama-bpe", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"add_bos": False}, False),
        ("qwen2", {"add_bos": True}, True),
    ],
)
def test_bos_is_added_where_the_file_or_its_kind_says_so(
    tmp_path: Path, kind: str, more: dict[str, bool], expected: bool
) -> None:
    assert import_model(gguf(tmp_path, kind, **more), tmp_path / "models", "tiny").add_bos is expected


def test_what_ends_an_answer_is_taken_from_every_file(tmp_path: Path) -> None:
    spec = import_model(hugging_face(tmp_path), tmp_path / "models", "tiny")
    assert spec.eos_token_ids == [ids()["<|end|>"], ids()["<tool_call>"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.json": None}, r"source: holds no tokenizer\.json"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: not a usable tokenizer"),
        ({"model.safetensors.index.json": None}, r"holds neither model\.safetensors\.index\.json nor"),
        ({"model-00002-of-00002.safetensors": None}, "model-00002-of-00002.safetensors is missing"),
        ({"config.json": "["}, r"config\.json: not JSON"),
        ({"config.json": '{"model_type": "mamba"}'}, r"config\.json: model_type: 'mamba' is not one of"),
        ({"generation_config.json": "[]"}, r"generation_config\.json: expected an object"),
        ({"generation_config.json": '{"eos_token_id": 320}'}, "token id 320 is not below the 320 rows"),
        ({"chat_template.jinja": "{% for %}"}, "chat template is broken"),
    ],
)
def test_files_that_cannot_be_served_are_told_and_leave_nothing(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        import_model(hugging_face(tmp_path, **changes), tmp_path / "models", "tiny")
    assert [*(tmp_path / "models").iterdir()] == []


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path: Path) -> None:
    source = hugging_face(tmp_path, **{"tokenizer.json": published("llama-bpe", 400).to_str()})
    with pytest.raises(CatalogError, match="turns text into ids up to 404, the embedding has 320 rows"):
        import_model(source, tmp_path / "models", "tiny")


def test_a_published_name_brings_what_files_do_not_say(tmp_path: Path) -> None:
    models_dir = tmp_path / "models"
    spec = import_model(gguf(tmp_path), models_dir, "llama-3.1-70b")
    assert spec.license == "Llama 3.1 Community License"
    assert spec.deployment is not None
    assert Catalog.load(models_dir).get("llama-3.1-70b").deployment == spec.deployment
    assert import_model(tmp_path / "tiny.gguf", models_dir, "qwen3-8b").deployment is None


def test_files_that_name_no_end_are_refused(tmp_path: Path) -> None:
    config = json.dumps(CONFIGS["llama"])
    source = hugging_face(
        tmp_path, **{"config.json": config, "generation_config.json": None, "tokenizer_config.json": "{}"}
    )
    with pytest.raises(CatalogError, match="name no token that ends an answer"):
        import_model(source, tmp_path / "models", "tiny")


@pytest.mark.parametrize("name", ["../x", ".x", "a/b", ""])
def test_a_name_that_is_no_folders_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CatalogError, match="cannot be the name of a folder"):
        import_model(tmp_path, tmp_path / "models", name)


def test_the_command_says_how_to_go_on_and_does_not_overwrite(tmp_path: Path) -> None:
    source = gguf(tmp_path)
    command = ["model", "import", str(source), "--models-dir", str(tmp_path / "models")]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stdout) == (
        0,
        "model tiny is in the catalogue: ./infra/up --model tiny\n",
    )
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1
    assert "tiny is there already: choose another name" in again.stderr
