"""The events of Anthropic's /v1/messages, byte by byte.

Source: Anthropic API reference, "Streaming Messages".
"""

from collections.abc import Callable
from typing import Any

from gateway.sse import to_json
from schemas.api.answers import message_id, message_stop, message_usage
from schemas.api.errors import ApiError
from schemas.records import Completion

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageFrames:
    """One text block. `stop_sequence(completion)` is the stop string that ended the text, if one did."""

    __slots__ = ("_input_tokens", "_model", "_request_id", "_stop_sequence")

    def __init__(
        self,
        request_id: bytes,
        model: str,
        input_tokens: int,
        stop_sequence: Callable[[Completion], str | None],
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._input_tokens = input_tokens
        self._stop_sequence = stop_sequence

    def first(self) -> bytes:
        block = {"type": "text", "text": ""}
        return self._start() + _event("content_block_start", -1, index=0, content_block=block) + PING

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": message_id(self._request_id),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(self._input_tokens, 0, 0),
        }
        return _event("message_start", -1, message=message)

    def text(self, text: str, position: int) -> bytes:
        return (
            b'event: content_block_delta\nid: %d\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":%b}}\n\n' % (position, to_json(text))
        )

    def done(self, completion: Completion) -> bytes:
        position = completion.output_tokens - 1
        return _event("content_block_stop", position, index=0) + self._end(completion, 0, position)

    def _end(self, completion: Completion, num_tool_calls: int, position: int) -> bytes:
        delta = message_stop(completion.finish_reason, self._stop_sequence(completion), num_tool_calls)
        usage = message_usage(completion.input_tokens, completion.cached_tokens, completion.output_tokens)
        return _event("message_delta", position, delta=delta, usage=usage) + _event("message_stop", position)

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % to_json(error.to_anthropic(self._request_id))

    def keep_alive(self) -> bytes:
        return PING


def _event(kind: str, position: int, **fields: Any) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), position, to_json({"type": kind, **fields}))
