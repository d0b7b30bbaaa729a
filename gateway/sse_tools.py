"""Events of streams in which a model may call tools: its text is read as it comes.

What may become a call is held back until that is known. An event's id says how far the output was read, and
what is shown with it depends on the tokens up to there alone: who reads the output from its beginning shows
the same with each token. What only the end of the output tells has the id behind that of its last token.
"""

from typing import Any

from gateway.sse import ChatFrames, GenerateFrames, to_json
from gateway.sse_anthropic import PING, MessageFrames
from schemas.api.answers import chat_finish_reason, tool_call_id
from schemas.api.tool_calls import CHAT_CALL, MESSAGE_CALL, CallPiece, Piece, ToolCallParser, merged
from schemas.records import Completion


class ToolChatFrames(ChatFrames):
    """/v1/chat/completions. All that a token shows is one chunk."""

    __slots__ = ("_call_request_id", "_parser")

    def __init__(self, call_request_id: bytes, *args: Any, **options: Any) -> None:
        """`call_request_id`: of the choice, from which its calls' ids follow; the rest as ChatFrames."""
        super().__init__(*args, **options)
        self._call_request_id = call_request_id
        self._parser = ToolCallParser()

    def first(self) -> bytes:
        return self._chunk(self._choice({"role": "assistant", "content": None, "refusal": None}), -1)

    def text(self, text: str, position: int) -> bytes:
        return self._told(self._parser.push(text), position, position)

    def done(self, completion: Completion) -> bytes:
        return self.finish(completion) + self.end([completion], completion.output_tokens)

    def finish(self, completion: Completion) -> bytes:
        position, event_id = completion.output_tokens - 1, completion.output_tokens
        left = self._told(self._parser.end(), position, event_id)
        reason = chat_finish_reason(completion.finish_reason, self._parser.num_calls)
        return left + self._chunk(self._last_choice(reason), position, event_id)

    def _told(self, pieces: list[Piece], position: int, event_id: int) -> bytes:
        if not pieces:
            return b""
        said, calls = merged(pieces)
        delta: dict[str, Any] = {"content": said} if said else {}
        if calls:
            delta["tool_calls"] = [self._call(piece) for piece in calls]
        return self._chunk(self._choice(delta), position, event_id)

    def _call(self, piece: CallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"index": piece.call, "function": {"arguments": piece.arguments}}
        return {
            "index": piece.call,
            "id": tool_call_id(CHAT_CALL, self._call_request_id, piece.call),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }


class ToolMessageFrames(MessageFrames):
    """/v1/messages: a block for each text and each call, in the order of the output. Of a token's events the
    last one alone has an id: what came behind the last id comes again."""

    __slots__ = ("_in_text", "_index", "_parser")

    def __init__(self, *args: Any, **options: Any) -> None:
        """As MessageFrames."""
        super().__init__(*args, **options)
        self._parser = ToolCallParser()
        self._index = -1
        self._in_text = False

    def first(self) -> bytes:
        return self._start() + PING

    def text(self, text: str, position: int) -> bytes:
        return _with_id([each for piece in self._parser.push(text) for each in self._piece(piece)], position)

    def done(self, completion: Completion) -> bytes:
        event_id = completion.output_tokens
        left = [each for piece in self._parser.end() for each in self._piece(piece)]
        ending = _with_id([*left, *self._closed()], event_id)
        return ending + self._end(completion, self._parser.num_calls, event_id)

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, str):
            opened = [] if self._in_text else self._opened({"type": "text", "text": ""})
            self._in_text = True
            return [*opened, self._delta({"type": "text_delta", "text": piece})]
        if piece.name is not None:
            call_id = tool_call_id(MESSAGE_CALL, self._request_id, piece.call)
            self._in_text = False
            return self._opened({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
        return [self._delta({"type": "input_json_delta", "partial_json": piece.arguments})]

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _opened(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._closed()
        self._index += 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _closed(self) -> list[dict[str, Any]]:
        return [] if self._index < 0 else [{"type": "content_block_stop", "index": self._index}]


class ToolGenerateFrames(GenerateFrames):
    """The form of /v1/generate for a stream of either API, read again behind the id `after`: its output is
    given from the beginning, and what the client has is not shown. All that a token shows is one event."""

    __slots__ = ("_after", "_parser", "_prefix", "_request_id")

    def __init__(self, request_id: bytes, prefix: str, after: int) -> None:
        """`prefix`: of the calls' ids, which are those of the stream as it was."""
        self._request_id = request_id
        self._prefix = prefix
        self._after = after
        self._parser = ToolCallParser()

    def text(self, text: str, position: int) -> bytes:
        return self._told(self._parser.push(text), position)

    def done(self, completion: Completion) -> bytes:
        event_id = completion.output_tokens
        return self._told(self._parser.end(), event_id) + self._done(completion, event_id)

    def _told(self, pieces: list[Piece], event_id: int) -> bytes:
        if not pieces or event_id <= self._after:
            return b""
        text, calls = merged(pieces)
        event: dict[str, Any] = {"type": "token", "text": text}
        if calls:
            event["tool_calls"] = [self._call(piece) for piece in calls]
        return b"id: %d\ndata: %b\n\n" % (event_id, to_json(event))

    def _call(self, piece: CallPiece) -> dict[str, Any]:
        begun: dict[str, Any] = {}
        if piece.name is not None:
            call_id = tool_call_id(self._prefix, self._request_id, piece.call)
            begun = {"id": call_id, "name": piece.name}
        return {"index": piece.call, **begun, "arguments": piece.arguments}


def _with_id(events: list[dict[str, Any]], event_id: int) -> bytes:
    """The events of one token."""
    if not events:
        return b""
    parts = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event)) for event in events]
    last = events[-1]
    parts[-1] = b"event: %b\nid: %d\ndata: %b\n\n" % (last["type"].encode(), event_id, to_json(last))
    return b"".join(parts)
