"""Body of OpenAI's /v1/responses, and what it asks for."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.errors import ApiError, bad_field
from schemas.api.prepare import DEFAULT_MAX_TOKENS, Prepared, check_supported, priority_class
from schemas.api.prompts import find_model, output_limit
from schemas.api.routing import routing
from schemas.api.structured import schema_grammar
from schemas.chat_template import ChatTemplateError
from schemas.models import LoadedModel
from schemas.sampling import MAX_TOP_LOGPROBS, Grammar, SamplingParams

RESPONSES_URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"


class InputText(Struct, forbid_unknown_fields=True, tag="input_text"):
    text: str


class OutputText(Struct, forbid_unknown_fields=True, tag="output_text"):
    """A part of an earlier answer, which clients send back as it is."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    """`id`, `status`: of an earlier answer that is sent back."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | OutputText], Meta(max_length=fields.MAX_PARTS)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


class PlainText(Struct, forbid_unknown_fields=True, tag="text"):
    pass


class JsonObject(Struct, forbid_unknown_fields=True, tag="json_object"):
    pass


class JsonSchema(Struct, forbid_unknown_fields=True, tag="json_schema"):
    """The schema is always kept to, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True):
    format: PlainText | JsonObject | JsonSchema | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """No model here reasons apart from its answer."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Nothing is added to the events to hide their length."""

    include_obfuscation: Literal[False] | None = None


Input = Annotated[list[InputMessage], Meta(min_length=1, max_length=fields.MAX_MESSAGES)]


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses. Fields that are not served stand here for a refusal that names them.

    `seed`, `top_k`, `ignore_eos`, `priority` and `allow_fallback` are ours, as in the other APIs.
    """

    model: str
    input: str | Input
    instructions: str | None = None
    max_output_tokens: fields.Positive | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Meta(max_length=8)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: fields.Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    seed: fields.Seed | None = None
    top_k: fields.TopK | None = None
    ignore_eos: bool = False
    priority: str | None = None
    allow_fallback: bool = True

    @property
    def stored(self) -> bool:
        """The answer can be read again, for as long as the log keeps it."""
        return self.store is not False

    def unsupported(self) -> str | None:
        """The first field that asks for what is not served."""
        asked: tuple[tuple[str, Any], ...] = (
            ("tools", self.tools),
            ("tool_choice", None if self.tool_choice in ("none", "auto") else self.tool_choice),
            ("max_tool_calls", self.max_tool_calls),
            ("prompt", self.prompt),
            ("context_management", self.context_management),
            ("moderation", self.moderation),
        )
        return next((name for name, value in asked if value), None)


def prepare_response(body: ResponsesBody, models: Mapping[str, LoadedModel]) -> Prepared:
    """Tokenizes (a millisecond per few hundred words). Raises ApiError that names the field."""
    model = find_model(body.model, models)
    for name, value in (
        ("previous_response_id", body.previous_response_id),
        ("conversation", body.conversation),
    ):
        if value is not None:
            message = f"{name}: no conversation is kept; send what was said before in input"
            raise ApiError(400, "unsupported_field", message, name)
    check_supported(body.unsupported())
    if body.background and not body.stored:
        raise bad_field("background", "needs store: true; what is not stored cannot be read later")
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "goes with stream: true")
    with_logprobs = bool(body.include)
    if body.top_logprobs and not with_logprobs:
        raise bad_field("top_logprobs", f"goes with include: [{LOGPROBS!r}]")
    ids = _prompt_ids(body, model)
    limit = output_limit(
        body.max_output_tokens,
        DEFAULT_MAX_TOKENS,
        "max_output_tokens",
        len(ids),
        model.spec.max_model_len,
        "input",
    )
    sampling = SamplingParams(
        max_tokens=limit,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        ignore_eos=body.ignore_eos,
        logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        grammar=_grammar(body.text),
    )
    priority = priority_class(body.priority)
    return Prepared(
        RESPONSES_URL,
        model,
        ids,
        len(ids),
        sampling,
        priority,
        bool(body.stream),
        limit_field="max_output_tokens" if body.max_output_tokens else None,
        routing=routing(body),
    )


def _prompt_ids(body: ResponsesBody, model: LoadedModel) -> list[int]:
    """`instructions` come first, with the system and developer messages that `input` begins with: templates
    know one system message."""
    messages = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else []
    if not isinstance(body.input, str):
        for item in body.input:
            text = item.content if isinstance(item.content, str) else "".join(p.text for p in item.content)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text})
    if body.instructions:
        begin = [body.instructions]
        while messages and messages[0]["role"] == "system":
            begin.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(begin)})
    if model.chat_template is None:
        raise bad_field("model", f"{model.spec.id} has no chat template; use /v1/completions")
    try:
        return model.chat_template.encode(messages)
    except ChatTemplateError as e:
        raise bad_field("input", str(e)) from None


def _grammar(text: TextConfig | None) -> Grammar | None:
    match None if text is None else text.format:
        case JsonObject():
            return schema_grammar({"type": "object"}, "text.format")
        case JsonSchema(schema=schema):
            return schema_grammar(schema, "text.format.schema")
        case _:
            return None
