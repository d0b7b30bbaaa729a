"""Bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and what they ask for."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.errors import bad_field
from schemas.api.prepare import MESSAGES_URL, Prepared, check_supported, priority_class, stop_strings
from schemas.api.prompts import check_unicode, find_model, output_limit, template_ids
from schemas.api.structured import schema_grammar
from schemas.models import LoadedModel
from schemas.sampling import Grammar, SamplingParams

COUNT_TOKENS_URL = f"{MESSAGES_URL}/count_tokens"


class CacheControl(Struct, forbid_unknown_fields=True):
    """Asks for what prefix caching does by itself."""

    type: Literal["ephemeral"]


class TextBlock(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["disabled"]


class JsonFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    format: JsonFormat | None = None
    effort: None = None


class CountTokensBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens. Fields that are not served stand here for a refusal that names them."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=fields.MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None

    def unsupported(self) -> str | None:
        """The first field that asks for what is not served."""
        choice = None if self.tool_choice == {"type": "none"} else self.tool_choice
        asked = (("tools", self.tools), ("tool_choice", choice))
        return next((name for name, value in asked if value), None)


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: fields.Positive
    stop_sequences: fields.StopStrings | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    metadata: Metadata | None = None
    stream: bool | None = False
    service_tier: Literal["auto", "standard_only"] | None = None
    priority: str | None = None


def prepare_messages(body: MessagesBody, models: Mapping[str, LoadedModel]) -> Prepared:
    """Tokenizes (a millisecond per few hundred words). Raises ApiError that names the field."""
    model = find_model(body.model, models)
    ids = _prompt_ids(body, model)
    limit = output_limit(
        body.max_tokens, body.max_tokens, "max_tokens", len(ids), model.spec.max_model_len, "messages"
    )
    sampling = SamplingParams(
        max_tokens=limit,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbits(63),
        stop=stop_strings(body.stop_sequences, "stop_sequences"),
        grammar=_grammar(body.output_config),
    )
    priority = priority_class(body.priority)
    return Prepared(MESSAGES_URL, model, ids, len(ids), sampling, priority, bool(body.stream))


def count_tokens(body: CountTokensBody, models: Mapping[str, LoadedModel]) -> dict[str, int]:
    """The input tokens of a message with this prompt. Raises ApiError that names the field."""
    return {"input_tokens": len(_prompt_ids(body, find_model(body.model, models)))}


def _prompt_ids(body: CountTokensBody, model: LoadedModel) -> list[int]:
    check_supported(body.unsupported())
    inputs: list[dict[str, Any]] = []
    if body.system:
        inputs.append({"role": "system", "content": _text(body.system, "system")})
    for i, turn in enumerate(body.messages):
        text = _text(turn.content, f"messages[{i}].content")
        if inputs and inputs[-1]["role"] == turn.role:
            # Anthropic's API takes turns of one role that follow one another for one.
            inputs[-1]["content"] += f"\n{text}"
        else:
            inputs.append({"role": turn.role, "content": text})
    last = inputs[-1]
    prefilled = last["role"] == "assistant"
    if prefilled and last["content"] != last["content"].rstrip():
        # Tokens of words begin with their blank: behind one the model would be lost.
        where = f"messages[{len(body.messages) - 1}].content"
        raise bad_field(where, "an answer that is to be continued cannot end with trailing whitespace")
    return template_ids(inputs, model, continue_last=prefilled)


def _grammar(config: OutputConfig | None) -> Grammar | None:
    if config is None or config.format is None:
        return None
    return schema_grammar(config.format.schema, "output_config.format.schema")


def _text(content: str | list[TextBlock], field: str) -> str:
    text = content if isinstance(content, str) else "".join(block.text for block in content)
    check_unicode(text, field)
    return text
