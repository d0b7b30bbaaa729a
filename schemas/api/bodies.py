"""Request bodies of the APIs: /v1/generate and OpenAI's /v1/chat/completions. JSON in, typed structs out."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from schemas.api.errors import ApiError, bad_field
from schemas.api.structured import ResponseFormat
from schemas.sampling import MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_MESSAGES = 2048
_Positive = Annotated[int, Meta(ge=1)]
_Temperature = Annotated[float, Meta(ge=0, le=2)]
_TopP = Annotated[float, Meta(gt=0, le=1)]
_TopK = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Regex = Annotated[str, Meta(min_length=1)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]
_MinP = Annotated[float, Meta(ge=0, le=1)]
_MinTokens = Annotated[int, Meta(ge=0)]
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stop = _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)]
_OpenAIStop = _StopString | Annotated[list[_StopString], Meta(max_length=4)]
_LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)]
_StopIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_input(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text}


_Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class GenerateBody(Struct, forbid_unknown_fields=True):
    """POST /v1/generate."""

    model: str
    messages: _Messages | None = None
    prompt: str | None = None
    max_tokens: _Positive | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    seed: _Seed | None = None
    stream: bool = False
    priority: str | None = None
    ignore_eos: bool = False
    stop_token_ids: _StopIds | None = None
    stop: _Stop | None = None
    min_tokens: _MinTokens | None = None
    min_p: _MinP | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: _RepetitionPenalty | None = None
    logit_bias: _LogitBias | None = None
    response_format: ResponseFormat | None = None
    regex: _Regex | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class ChatCompletionBody(Struct, forbid_unknown_fields=True):
    """POST /v1/chat/completions. Fields that are not served stand here for a refusal that names them."""

    model: str
    messages: _Messages
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    seed: _Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: str | None = None
    ignore_eos: bool = False
    stop_token_ids: _StopIds | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    n: Literal[1] | None = 1
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: _OpenAIStop | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    store: bool | None = None

    def unsupported(self) -> str | None:
        """The first field that asks for what is not served."""
        asked = (
            ("logprobs", self.logprobs),
            ("top_logprobs", self.top_logprobs),
            ("tools", self.tools),
            ("tool_choice", None if self.tool_choice == "none" else self.tool_choice),
            ("store", self.store),
        )
        return next((name for name, value in asked if value), None)


B = TypeVar("B", bound=GenerateBody | ChatCompletionBody)
_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `(?P<field>[^`]+)`")


def decode_body(data: bytes, kind: type[B]) -> B:
    """Raises ApiError 400 naming the field that does not fit, or that `data` is no JSON object."""
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
