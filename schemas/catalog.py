"""The model catalogue: one folder a model, `<models_dir>/<id>/model.json` beside its weights and tokenizer.

To serve another model, put its folder there. The model `simulated` is built in and needs no files.
"""

import dataclasses
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.template_source import TemplateSourceError, folder_template, tool_call_format

SIMULATED_MODEL = "simulated"
TOOL_CALL_FORMATS = ("hermes",)
NUMBER_FORMATS = ("bf16", "fp8")
_SIMULATED_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class CatalogError(ValueError):
    """A model that is not there, or a model.json that is not right; the message names file and field."""


# One KV block. Only full blocks are ever found again, so what is shorter is computed each time it is run.
CANARY_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Canary:
    """A prompt and its greedy continuation, by which a worker proves that it computes right.

    To be made in full precision, with a prompt that leaves no doubt at any step: a faster number format must
    come to the same tokens.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a model is meant to run on: `tensor_parallel` GPUs of `device_memory_gb` (of 10^9 bytes) each.
    Weights, and keys and values, are in one of NUMBER_FORMATS.

    It is what `headrace model plan` reckons with, and what a worker serves the model on (its ranks, and on
    GPUs the format of keys and values), where nothing else is asked for.
    """

    tensor_parallel: int
    device_memory_gb: int
    weight_format: str
    kv_format: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the fleet must agree on about one model. Lengths are in tokens.

    `weights` and `tokenizer` are file names in the model's folder; empty for the simulated model. Without a
    `canary` each worker takes what it computes when it starts for right. Where `chat_template` is empty it
    is the folder's (template_source.py). `tool_call_format` is how the model writes tool calls
    (api/tool_calls.py); empty, it is what the template shows, if it has tools.
    """

    id: str
    architecture: str
    weights: str
    tokenizer: str
    max_model_len: int
    bos_token_id: int
    add_bos: bool
    eos_token_ids: list[int]
    chat_template: str = ""
    license: str = ""
    license_url: str = ""
    description: str = ""
    fallback_models: list[str] = field(default_factory=list)
    canary: Canary | None = None
    tool_call_format: str = ""
    deployment: Deployment | None = None


def simulated_model() -> ModelSpec:
    """Bytes as tokens 0 … 255, then bos 256 and eos 257."""
    return ModelSpec(
        id=SIMULATED_MODEL,
        architecture="simulated",
        weights="",
        tokenizer="",
        max_model_len=32_768,
        bos_token_id=256,
        add_bos=True,
        eos_token_ids=[257],
        chat_template=_SIMULATED_TEMPLATE,
        description="No weights: tokens are a function of request and position",
    )


def parse_spec(text: str, source: str) -> ModelSpec:
    """The spec in a model.json. Raises CatalogError that names `source` and the field."""
    try:
        data = json.loads(text)
    except ValueError as e:
        raise CatalogError(f"{source}: not JSON: {e}") from None
    if not isinstance(data, dict):
        raise CatalogError(f"{source}: expected an object")
    hints = typing.get_type_hints(ModelSpec)
    fields = {f.name: f for f in dataclasses.fields(ModelSpec)}
    if unknown := sorted(data.keys() - fields.keys()):
        raise CatalogError(f"{source}: unknown field {unknown[0]!r}")
    for name, f in fields.items():
        if name not in data:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise CatalogError(f"{source}: field {name!r} is missing")
            continue
        value, hint = data[name], hints[name]
        if name in _PARSERS:
            data[name] = None if value is None else _PARSERS[name](value, source)
            continue
        kind = typing.get_origin(hint) or hint
        good = isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
        if good and kind is list:
            good = all(type(item) is hint.__args__[0] for item in value)
        if not good:
            raise CatalogError(f"{source}: field {name!r} must be {getattr(hint, '__name__', hint)}")
    spec = ModelSpec(**data)
    if spec.max_model_len < 1:
        raise CatalogError(f"{source}: field 'max_model_len' must be at least 1")
    if spec.tool_call_format not in ("", *TOOL_CALL_FORMATS):
        known = ", ".join(TOOL_CALL_FORMATS)
        raise CatalogError(f"{source}: field 'tool_call_format' must be one of {known}, or empty")
    return spec


def _fields(kind: type, name: str, value: object, source: str) -> dict[str, Any]:
    """`value`, if it is an object with the fields of the dataclass `kind`. Raises CatalogError."""
    names = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise CatalogError(f"{source}: field {name!r} must be an object with {' and '.join(names)}")
    return value


def _parse_deployment(value: object, source: str) -> Deployment:
    fields = _fields(Deployment, "deployment", value, source)
    for name in ("tensor_parallel", "device_memory_gb"):
        if type(fields[name]) is not int or fields[name] < 1:
            raise CatalogError(f"{source}: field 'deployment.{name}' must be an integer of at least 1")
    for name in ("weight_format", "kv_format"):
        if fields[name] not in NUMBER_FORMATS:
            raise CatalogError(
                f"{source}: field 'deployment.{name}' must be one of {', '.join(NUMBER_FORMATS)}"
            )
    return Deployment(**fields)


def _parse_canary(value: object, source: str) -> Canary:
    fields = _fields(Canary, "canary", value, source)
    for name, ids in fields.items():
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise CatalogError(f"{source}: field 'canary.{name}' must be a list of token ids, not empty")
    canary = Canary(**fields)
    if (length := len(canary.prompt_token_ids) + len(canary.output_token_ids)) > CANARY_MAX_TOKENS:
        raise CatalogError(
            f"{source}: field 'canary' has {length} tokens, at most {CANARY_MAX_TOKENS} can be run without "
            "being cached"
        )
    return canary


_PARSERS: dict[str, Callable[[object, str], Any]] = {"canary": _parse_canary, "deployment": _parse_deployment}


class Catalog:
    """The models of a folder, and the simulated one."""

    def __init__(self, specs: list[ModelSpec], models_dir: Path) -> None:
        self.models_dir = models_dir
        self.specs = {spec.id: spec for spec in specs}

    @classmethod
    def load(cls, models_dir: Path) -> "Catalog":
        """Reads every `*/model.json`. A folder that is not there holds no models. Raises CatalogError."""
        specs = [simulated_model()]
        for path in sorted(models_dir.glob("*/model.json")):
            spec = parse_spec(path.read_text(), str(path))
            if spec.id != path.parent.name:
                raise CatalogError(f"{path}: field 'id' is {spec.id!r}, but the folder is another name")
            if not spec.chat_template:
                spec = _with_template_of(path.parent, spec)
            specs.append(spec)
        return cls(specs, models_dir)

    def get(self, model_id: str) -> ModelSpec:
        """Raises CatalogError listing the models that there are."""
        spec = self.specs.get(model_id)
        if spec is None:
            known = ", ".join(sorted(self.specs)) or "none"
            raise CatalogError(f"no model {model_id!r} in {self.models_dir} (there: {known})")
        return spec

    def fallback_models(self) -> dict[str, list[str]]:
        """By model, those that serve for it under overload, in order, of the models that have some.

        Raises CatalogError for one that is not there, or that would read the model's prompts as other text.
        """
        found = {name: spec.fallback_models for name, spec in self.specs.items() if spec.fallback_models}
        for name, fallbacks in found.items():
            self.check_fallbacks(name, fallbacks)
        return found

    def check_fallbacks(self, name: str, fallbacks: list[str]) -> None:
        """Raises CatalogError where they cannot serve for the model of that name, which is there."""
        if name in fallbacks:
            raise CatalogError(f"model {name!r}: field 'fallback_models' names the model itself")
        for other in fallbacks:
            if difference := self._reads_otherwise(self.get(name), self.get(other)):
                raise CatalogError(
                    f"model {name!r}: field 'fallback_models' names {other!r}, which has another "
                    f"{difference}: its prompts would not be this model's"
                )

    def _reads_otherwise(self, spec: ModelSpec, other: ModelSpec) -> str | None:
        """The first part by which two models turn the same messages into different ids, or ids into text."""
        for name in ("bos_token_id", "add_bos", "eos_token_ids", "chat_template"):
            if getattr(spec, name) != getattr(other, name):
                return name
        # With one template it is the same where neither says it.
        shown = tool_call_format(spec.chat_template)
        if (spec.tool_call_format or shown) != (other.tool_call_format or shown):
            return "tool_call_format"
        same = spec.tokenizer == other.tokenizer == "" or (
            bool(spec.tokenizer and other.tokenizer)
            and _content(self.tokenizer_path(spec)) == _content(self.tokenizer_path(other))
        )
        return None if same else "tokenizer"

    def on_disk(self) -> list[str]:
        """Ids of the models that have a folder."""
        return [name for name, spec in self.specs.items() if spec.weights]

    def weights_path(self, spec: ModelSpec) -> Path:
        return self.models_dir / spec.id / spec.weights

    def tokenizer_path(self, spec: ModelSpec) -> Path:
        return self.models_dir / spec.id / spec.tokenizer


def _with_template_of(folder: Path, spec: ModelSpec) -> ModelSpec:
    try:
        return dataclasses.replace(spec, chat_template=folder_template(folder))
    except TemplateSourceError as error:
        raise CatalogError(str(error)) from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror}") from None
