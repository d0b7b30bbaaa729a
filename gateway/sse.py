"""Server-sent events, byte by byte. All that does not change within a stream is encoded once.

Source: WHATWG HTML, "Server-sent events"; OpenAI API reference, "Chat completion chunk object", "Completion
object".
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from schemas.api.answers import (
    chat_completion_id,
    completion_id,
    openai_usage,
    own_usage,
    total_usage,
)
from schemas.api.errors import ApiError
from schemas.records import Completion

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# A line alone: behind an event with an id OpenAI's client takes an empty line for an event without data.
KEEP_ALIVE = b": keep-alive\n"
_DONE = b"data: [DONE]\n\n"

# JSON of one value: no raw newline can leave it, so an event is always one `data:` line.
to_json = msgspec.json.Encoder().encode

Logprobs = Callable[[int | None], dict[str, Any] | None]


class Frames(Protocol):
    """The events of one stream.

    Each but the error has an id: the position of the last output token that the client has with it, from 0;
    -1 with none. With it as Last-Event-ID the stream goes on behind that token (api/streams.py). An error
    leaves the client's last id as it is. Of streams with tool calls: see sse_tools.py.
    """

    def first(self) -> bytes:
        """What comes before any text; may be empty."""

    def text(self, text: str, position: int) -> bytes:
        """A piece of the output; `position` is that of the last output token it takes in."""

    def done(self, completion: Completion) -> bytes:
        """The normal end."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed after its first byte."""

    def keep_alive(self) -> bytes:
        """What is sent when nothing has come for a while."""


class GenerateFrames:
    """/v1/generate."""

    __slots__ = ()

    def first(self) -> bytes:
        return b""

    def text(self, text: str, position: int) -> bytes:
        return b'id: %d\ndata: {"type":"token","text":%b}\n\n' % (position, to_json(text))

    def done(self, completion: Completion) -> bytes:
        return self._done(completion, completion.output_tokens - 1)

    def _done(self, completion: Completion, event_id: int) -> bytes:
        usage = own_usage(completion.input_tokens, completion.cached_tokens, completion.output_tokens)
        return b'id: %d\ndata: {"type":"done","usage":%b,"stop_reason":%b}\n\n' % (
            event_id,
            to_json(usage),
            to_json(completion.finish_reason),
        )

    def error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % to_json({"type": "error", **error.to_dict()})

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


class UsageSoFar:
    """OpenAI's usage while a stream goes on: the prompts of all its choices, and what was told of each."""

    __slots__ = ("_outputs", "_prompts")

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        """`prompt_tokens`: of each choice."""
        self._prompts = sum(prompt_tokens)
        self._outputs = [0] * len(prompt_tokens)

    def at(self, index: int, output_tokens: int) -> dict[str, Any]:
        """With so many output tokens of the choice `index`."""
        self._outputs[index] = output_tokens
        return openai_usage(self._prompts, None, sum(self._outputs))


class OpenAIFrames:
    """What OpenAI's two streams share: the chunks of one choice. With `include_usage` each chunk has "usage":
    null, and a last one the usage; with `continuous_usage` each has the usage up to it.

    A stream of several choices has frames for each, of which `done` is not used: each choice ends with
    `finish`, and the stream with the `end` of any of them.

    `logprobs(position)` is the object of the tokens that were told up to a position and not before, in the
    API's form, or None where there are none; with no position of all that are left.
    """

    __slots__ = (
        "_continuous_usage",
        "_head",
        "_include_usage",
        "_index",
        "_logprobs",
        "_plain",
        "_tail",
        "_text_head",
    )

    def __init__(
        self,
        head: dict[str, Any],
        text_head: bytes,
        text_tail: bytes,
        include_usage: bool,
        continuous_usage: UsageSoFar | None,
        logprobs: Logprobs | None,
        index: int,
    ) -> None:
        """`continuous_usage` None: only at the end."""
        self._index = index
        self._head = b'data: %b,"choices":[' % to_json(head)[:-1]
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._logprobs = logprobs
        self._plain = logprobs is None and continuous_usage is None
        usage = b',"usage":null' if include_usage else b""
        self._text_head = self._head + text_head
        self._tail = b"%b]%b}\n\n" % (text_tail, usage)

    def first(self) -> bytes:
        raise NotImplementedError

    def text(self, text: str, position: int) -> bytes:
        if self._plain:
            return b"id: %d\n%b%b%b" % (position, self._text_head, to_json(text), self._tail)
        logprobs = None if self._logprobs is None else self._logprobs(position)
        return self._chunk(self._text_choice(text, logprobs), position)

    def done(self, completion: Completion) -> bytes:
        return self.finish(completion) + self.end([completion], completion.output_tokens - 1)

    def finish(self, completion: Completion) -> bytes:
        """The end of the choice."""
        position = completion.output_tokens - 1
        left = None if self._logprobs is None else self._logprobs(None)
        frames = b"" if left is None else self._chunk(self._text_choice("", left), position)
        return frames + self._chunk(self._last_choice(completion.finish_reason), position)

    def end(self, completions: Sequence[Completion], position: int | None) -> bytes:
        """The end of the stream and of all its choices; `position` is None where they have one each."""
        event_id = b"" if position is None else b"id: %d\n" % position
        usage = b""
        if self._include_usage:
            usage = b'%b%b],"usage":%b}\n\n' % (event_id, self._head, to_json(total_usage(completions)))
        return usage + event_id + _DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % to_json(error.to_dict())

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _chunk(self, choice: dict[str, Any], position: int, event_id: int | None = None) -> bytes:
        """`event_id` None: the position."""
        usage = b""
        if self._continuous_usage is not None:
            usage = b',"usage":%b' % to_json(self._continuous_usage.at(self._index, position + 1))
        elif self._include_usage:
            usage = b',"usage":null'
        event_id = position if event_id is None else event_id
        return b"id: %d\n%b%b]%b}\n\n" % (event_id, self._head, to_json(choice), usage)

    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        raise NotImplementedError

    def _last_choice(self, finish_reason: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatFrames(OpenAIFrames):
    """/v1/chat/completions."""

    __slots__ = ()

    def __init__(
        self,
        request_id: bytes,
        model: str,
        created_s: int,
        include_usage: bool,
        *,
        continuous_usage: UsageSoFar | None = None,
        logprobs: Logprobs | None = None,
        service_tier: str | None = None,
        index: int = 0,
    ) -> None:
        head = {
            "id": chat_completion_id(request_id),
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        if service_tier is not None:
            head["service_tier"] = service_tier
        text_head = b'{"index":%d,"delta":{"content":' % index
        text_tail = b'},"logprobs":null,"finish_reason":null}'
        super().__init__(head, text_head, text_tail, include_usage, continuous_usage, logprobs, index)

    def first(self) -> bytes:
        return self._chunk(self._choice({"role": "assistant", "content": "", "refusal": None}), -1)

    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return self._choice({"content": text}, logprobs)

    def _last_choice(self, finish_reason: str) -> dict[str, Any]:
        return self._choice({}, None, finish_reason)

    def _choice(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionFrames(OpenAIFrames):
    """/v1/completions."""

    __slots__ = ()

    def __init__(
        self,
        request_id: bytes,
        model: str,
        created_s: int,
        include_usage: bool,
        *,
        continuous_usage: UsageSoFar | None = None,
        logprobs: Logprobs | None = None,
        index: int = 0,
    ) -> None:
        head = {
            "id": completion_id(request_id),
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        text_tail = b',"index":%d,"logprobs":null,"finish_reason":null}' % index
        super().__init__(head, b'{"text":', text_tail, include_usage, continuous_usage, logprobs, index)

    def first(self) -> bytes:
        return b""

    def _text_choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "index": self._index, "logprobs": logprobs, "finish_reason": None}

    def _last_choice(self, finish_reason: str) -> dict[str, Any]:
        return {"text": "", "index": self._index, "logprobs": None, "finish_reason": finish_reason}
