"""Request bodies of the APIs: /v1/generate and OpenAI's /v1/chat/completions. JSON in, typed structs out."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.choices import MAX_N
from schemas.api.errors import ApiError, bad_field
from schemas.api.structured import ResponseFormat
from schemas.api.tools import MAX_TOOLS, ToolChoice, Tools
from schemas.sampling import MAX_TOP_LOGPROBS


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(Struct, forbid_unknown_fields=True):
    """`arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that can only be null are in the answers, which clients send back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=fields.MAX_PARTS)] | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=fields.MAX_MESSAGES)]


class GenerateBody(Struct, forbid_unknown_fields=True):
    """POST /v1/generate."""

    model: str
    messages: Messages | None = None
    prompt: str | None = None
    max_tokens: fields.Positive | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    seed: fields.Seed | None = None
    stream: bool = False
    priority: str | None = None
    allow_fallback: bool = True
    ignore_eos: bool = False
    stop_token_ids: fields.StopIds | None = None
    stop: fields.Stop | None = None
    min_tokens: fields.MinTokens | None = None
    min_p: fields.MinP | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    logit_bias: fields.LogitBiases | None = None
    response_format: ResponseFormat | None = None
    regex: fields.Regex | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatCompletionBody(Struct, forbid_unknown_fields=True):
    """POST /v1/chat/completions. Fields that are not served stand here for a refusal that names them."""

    model: str
    messages: Messages
    max_tokens: fields.Positive | None = None
    max_completion_tokens: fields.Positive | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    seed: fields.Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: str | None = None
    allow_fallback: bool = True
    ignore_eos: bool = False
    stop_token_ids: fields.StopIds | None = None
    user: str | None = None
    metadata: fields.Metadata | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stop: fields.OpenAIStop | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: fields.LogitBiases | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    reasoning_effort: Literal["none"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def unsupported(self) -> str | None:
        """The first field that asks for what is not served."""
        return "store" if self.store else None


B = TypeVar("B", bound=Struct)
_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `(?P<field>[^`]+)`")


def decode_body(data: bytes, kind: type[B]) -> B:
    """Of a field that stands twice the last one counts, as in other JSON readers.

    Raises ApiError 400 naming the field that does not fit, or that `data` is no JSON object.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise _refusal(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {e}") from None


def convert_body(value: object, kind: type[B]) -> B:
    """As `decode_body`, from already decoded JSON (a batch line's body)."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as e:
        raise _refusal(str(e)) from None


def _refusal(message: str) -> ApiError:
    path = _PATH.search(message)
    where = path["path"].lstrip(".") if path else ""
    text = message[: path.start()] if path else message
    if field := _FIELD.search(text):
        where = f"{where}.{field['field']}".lstrip(".")
        if "unknown field" in text:
            return ApiError(400, "unknown_field", f"{where}: this field is not supported", where)
        return ApiError(400, "missing_field", f"{where}: this field is required", where)
    return bad_field(where or "body", text)
