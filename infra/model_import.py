"""Makes a catalogue entry of a model's files: a GGUF file, or a folder as Hugging Face has it.

All that can be wrong with them is found before anything is written. Weights are linked, not copied.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from infra.local.gguf_tokenizer import build_tokenizer
from infra.model_plan import PUBLISHED
from schemas.catalog import Catalog, CatalogError, ModelSpec
from schemas.chat_template import ChatTemplate
from schemas.template_source import folder_template
from schemas.tokenization import Tokenizer
from workers.models.decoder_config import DecoderConfig
from workers.models.open_weights import open_weights
from workers.weights.gguf import GGUFFile
from workers.weights.gguf_cursor import MetadataValue

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# What ends a turn, whatever the file names as its end of sequence (as llama.cpp has it).
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def import_model(source: Path, models_dir: Path, name: str) -> ModelSpec:
    """Puts the model of `source` into the catalogue as `name`.

    Raises CatalogError for a name that is taken or no file name, and for files that are missing or do not go
    together; WeightsError or another ValueError for what cannot be served; OSError.
    """
    target = models_dir / name
    if not name or Path(name).name != name or name.startswith("."):
        raise CatalogError(f"{name!r} cannot be the name of a folder")
    if target.exists():
        raise CatalogError(f"{target} is there already: choose another name, or take it away first")
    models_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".import-", dir=models_dir) as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        # 1. The files, in a folder that no catalogue sees: it has no model.json.
        weights = _link(source, folder)
        with open_weights(folder / weights) as opened:
            config, vocab_size = opened.config, opened.vocab_size
        entry = _gguf_entry(folder / weights) if weights.endswith(".gguf") else _hugging_face_entry(folder)
        spec = _spec(name, weights, config, entry)
        _check(spec, folder, vocab_size)
        # 2. Under its name, whole but for what makes it an entry.
        folder.rename(target)
    # 3. The entry: from here on the model is in the catalogue.
    partial = target / "model.json.partial"
    partial.write_text(json.dumps(dataclasses.asdict(spec), indent=2) + "\n")
    partial.rename(target / "model.json")
    return spec


def _link(source: Path, folder: Path) -> str:
    """Links to the files that `source` is; the name of the one that is opened."""
    source = source.absolute()
    if source.suffix == ".gguf":
        (folder / "model.gguf").symlink_to(source)
        return "model.gguf"
    if not source.is_dir():
        raise CatalogError(f"{source}: neither a GGUF file nor a folder")
    for path in source.iterdir():
        # An entry of another catalogue is not this one's.
        if path.is_file() and path.name != "model.json":
            (folder / path.name).symlink_to(path)
    found = next((name for name in (_INDEX, _SINGLE) if (folder / name).is_file()), None)
    if found is None:
        raise CatalogError(f"{source}: holds neither {_INDEX} nor {_SINGLE}")
    if not (folder / "tokenizer.json").is_file():
        raise CatalogError(f"{source}: holds no tokenizer.json")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """What the files say beside the weights. `ends` has the tokenizer's own end of sequence first."""

    bos: int | None
    add_bos: bool
    ends: list[int]
    chat_template: str = ""


def _gguf_entry(path: Path) -> _Entry:
    """Writes tokenizer.json beside the file."""
    with GGUFFile(path) as gguf:
        metadata = gguf.metadata
    tokenizer = build_tokenizer(metadata)
    (path.parent / "tokenizer.json").write_text(tokenizer.to_str())
    named = [_token_id(metadata, key) for key in _END_KEYS]
    ends = [token_id for token_id in [*named, *map(tokenizer.token_to_id, _ENDS)] if token_id is not None]
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise CatalogError(f"{path}: metadata 'tokenizer.chat_template': not a text")
    # Where the file does not say, as llama.cpp does: all but byte-level BPE that is not Llama's.
    by_kind = metadata.get("tokenizer.ggml.model") == "llama" or (
        metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", by_kind) is True
    return _Entry(_token_id(metadata, "bos_token_id"), add_bos, ends, template)


def _token_id(metadata: Mapping[str, MetadataValue], key: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if type(value) is int else None


def _hugging_face_entry(folder: Path) -> _Entry:
    config = _object(folder / "config.json")
    generation = _object(folder / "generation_config.json")
    told = _object(folder / "tokenizer_config.json").get("eos_token")
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    own = told.get("content") if isinstance(told, dict) else told
    ends = [] if not isinstance(own, str) else [tokenizer.token_to_id(own)]
    for values in (generation, config):
        ends += _ids(values.get("eos_token_id"))
    bos = next(iter(_ids(config.get("bos_token_id")) + _ids(generation.get("bos_token_id"))), None)
    return _Entry(bos, tokenizer.encode("x").ids[:1] == [bos], [each for each in ends if each is not None])


def _object(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CatalogError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CatalogError(f"{path}: expected an object")
    return values


def _read_tokenizer(path: Path) -> HfTokenizer:
    try:
        return HfTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CatalogError(f"{path}: not a usable tokenizer: {error}") from None


def _ids(value: object) -> list[int]:
    values: Iterable[object] = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int]


def _spec(name: str, weights: str, config: DecoderConfig, entry: _Entry) -> ModelSpec:
    ends = list(dict.fromkeys(entry.ends))
    if not ends:
        raise CatalogError(f"{name}: the files name no token that ends an answer (eos_token_id)")
    return ModelSpec(
        id=name,
        architecture=config.architecture,
        weights=weights,
        tokenizer="tokenizer.json",
        max_model_len=config.context_length,
        bos_token_id=ends[0] if entry.bos is None else entry.bos,
        add_bos=entry.add_bos,
        eos_token_ids=ends,
        chat_template=entry.chat_template,
        **_told(name, config),
    )


def _told(name: str, config: DecoderConfig) -> dict[str, Any]:
    """What the published entry of that name says and files do not."""
    known = Catalog.load(PUBLISHED).specs.get(name)
    if known is None or known.architecture != config.architecture:
        return {}
    return {each: getattr(known, each) for each in ("license", "license_url", "description", "deployment")}


def _check(spec: ModelSpec, folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer.from_file(folder / spec.tokenizer, spec)
    if template := spec.chat_template or folder_template(folder):
        ChatTemplate(template, tokenizer)
    # Markers beyond the embedding's rows are in published files (of pictures, for a model of text).
    last = max(token_id for token_id, text in enumerate(tokenizer.token_bytes) if text)
    if last >= vocab_size:
        raise CatalogError(
            f"{spec.id}: the tokenizer turns text into ids up to {last}, the embedding has {vocab_size} rows"
        )
    if (highest := max(spec.bos_token_id, *spec.eos_token_ids)) >= vocab_size:
        raise CatalogError(
            f"{spec.id}: token id {highest} is not below the {vocab_size} rows of the embedding"
        )
