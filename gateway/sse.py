"""Server-sent events, byte by byte. All that does not change within a stream is encoded once.

Source: WHATWG HTML, "Server-sent events"; OpenAI API reference, "Chat completion chunk object".
"""

from typing import Any, Protocol

import msgspec

from schemas.api.answers import chat_completion_id, openai_usage, own_usage
from schemas.api.errors import ApiError
from schemas.records import Completion

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"

# JSON of one value: no raw newline can leave it, so an event is always one `data:` line.
to_json = msgspec.json.Encoder().encode


class Frames(Protocol):
    """The events of one stream.

    Each but the error has an id: the position of the last output token that the client has with it, from 0;
    -1 with none. With it as Last-Event-ID the stream goes on behind that token (api/streams.py). An error
    leaves the client's last id as it is.
    """

    def first(self) -> bytes:
        """What comes before any text; may be empty."""

    def text(self, text: str, position: int) -> bytes:
        """A piece of the output; `position` is that of the last output token it takes in."""

    def done(self, completion: Completion) -> bytes:
        """The normal end."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed after its first byte."""


class GenerateFrames:
    """/v1/generate."""

    __slots__ = ()

    def first(self) -> bytes:
        return b""

    def text(self, text: str, position: int) -> bytes:
        return b'id: %d\ndata: {"type":"token","text":%b}\n\n' % (position, to_json(text))

    def done(self, completion: Completion) -> bytes:
        usage = own_usage(completion.input_tokens, completion.cached_tokens, completion.output_tokens)
        return b'id: %d\ndata: {"type":"done","usage":%b,"stop_reason":%b}\n\n' % (
            completion.output_tokens - 1,
            to_json(usage),
            to_json(completion.finish_reason),
        )

    def error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % to_json({"type": "error", **error.to_dict()})


class ChatFrames:
    """/v1/chat/completions. With `include_usage` each chunk has "usage": null, and a last one the usage."""

    __slots__ = ("_head", "_include_usage", "_tail", "_text_head")

    def __init__(self, request_id: bytes, model: str, created_s: int, include_usage: bool) -> None:
        self._head = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (
                to_json(chat_completion_id(request_id)),
                created_s,
                to_json(model),
            )
        )
        self._text_head = self._head + b'{"index":0,"delta":{"content":'
        self._include_usage = include_usage
        usage = b',"usage":null' if include_usage else b""
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def first(self) -> bytes:
        return b"id: -1\n" + self._chunk({"role": "assistant", "content": "", "refusal": None}, None)

    def text(self, text: str, position: int) -> bytes:
        return b"id: %d\n%b%b%b" % (position, self._text_head, to_json(text), self._tail)

    def done(self, completion: Completion) -> bytes:
        event_id = b"id: %d\n" % (completion.output_tokens - 1)
        frames = event_id + self._chunk({}, completion.finish_reason)
        if self._include_usage:
            usage = openai_usage(completion.input_tokens, completion.cached_tokens, completion.output_tokens)
            frames += b'%b%b],"usage":%b}\n\n' % (event_id, self._head, to_json(usage))
        return frames + event_id + _DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % to_json(error.to_dict())

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = b',"usage":null' if self._include_usage else b""
        return b"%b%b]%b}\n\n" % (self._head, to_json(choice), usage)
