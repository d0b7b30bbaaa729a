"""Bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and what they ask for."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.errors import bad_field
from schemas.api.message_turns import (
    AnyChoice,
    CacheControl,
    MessageToolChoice,
    TextBlock,
    ToolDefinitions,
    ToolNameChoice,
    Turn,
    message_tools,
    turn_inputs,
)
from schemas.api.prepare import MESSAGES_URL, Prepared, check_beside_tools, priority_class, stop_strings
from schemas.api.prompts import find_model, output_limit, template_ids
from schemas.api.routing import routing
from schemas.api.structured import schema_grammar
from schemas.api.tools import ToolUse
from schemas.models import LoadedModel
from schemas.sampling import Grammar, SamplingParams

COUNT_TOKENS_URL = f"{MESSAGES_URL}/count_tokens"


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
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=fields.MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=fields.MAX_PARTS)] | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: ToolDefinitions | None = None
    tool_choice: MessageToolChoice | None = None


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
    allow_fallback: bool = True


def prepare_messages(body: MessagesBody, models: Mapping[str, LoadedModel]) -> Prepared:
    """Tokenizes (a millisecond per few hundred words). Raises ApiError that names the field."""
    model = find_model(body.model, models)
    ids, use = _prompt(body, model)
    grammar = _grammar(body.output_config)
    if use is not None:
        check_beside_tools("output_config.format", grammar)
        grammar = use.grammar
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
        grammar=grammar,
    )
    priority = priority_class(body.priority)
    return Prepared(
        MESSAGES_URL,
        model,
        ids,
        len(ids),
        sampling,
        priority,
        bool(body.stream),
        has_tools=use is not None,
        limit_field="max_tokens",
        routing=routing(body),
    )


def count_tokens(body: CountTokensBody, models: Mapping[str, LoadedModel]) -> dict[str, int]:
    """The input tokens of a message with this prompt. Raises ApiError that names the field."""
    ids, _ = _prompt(body, find_model(body.model, models))
    return {"input_tokens": len(ids)}


def _prompt(body: CountTokensBody, model: LoadedModel) -> tuple[list[int], ToolUse | None]:
    use = message_tools(body.tools, body.tool_choice, model)
    inputs = turn_inputs(body.messages, body.system, model)
    last = inputs[-1]
    prefilled = last["role"] == "assistant"
    if prefilled:
        _check_prefill(last, f"messages[{len(body.messages) - 1}].content", body.tool_choice)
    return template_ids(inputs, model, continue_last=prefilled, tools=use and use.tools), use


def _check_prefill(last: dict[str, Any], field: str, choice: MessageToolChoice | None) -> None:
    if "tool_calls" in last:
        raise bad_field(field, "calls tools; their results must follow")
    if last["content"] != last["content"].rstrip():
        # Tokens of words begin with their blank: behind one the model would be lost.
        raise bad_field(field, "an answer that is to be continued cannot end with trailing whitespace")
    if isinstance(choice, AnyChoice | ToolNameChoice):
        raise bad_field("tool_choice", "a call cannot be asked for where an answer is to be continued")


def _grammar(config: OutputConfig | None) -> Grammar | None:
    if config is None or config.format is None:
        return None
    return schema_grammar(config.format.schema, "output_config.format.schema")
