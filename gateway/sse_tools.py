"""Events of streams in which a model may call tools: its text is read as it comes."""

from typing import Any

from gateway.sse import ChatFrames
from gateway.sse_anthropic import PING, MessageFrames, block_delta, block_start, block_stop
from schemas.api.answers import chat_finish_reason, tool_call_id
from schemas.api.tool_calls import Piece, ToolCallParser
from schemas.records import Completion


class ToolChatFrames(ChatFrames):
    """/v1/chat/completions. What may become a call is held back until that is known: an event's id says how
    far the output was read, not how far it is shown."""

    __slots__ = ("_call_request_id", "_parser")

    def __init__(self, call_request_id: bytes, *args: Any, **options: Any) -> None:
        """`call_request_id`: of the choice, from which its calls' ids follow; the rest as ChatFrames."""
        super().__init__(*args, **options)
        self._call_request_id = call_request_id
        self._parser = ToolCallParser()

    def first(self) -> bytes:
        return self._chunk(self._choice({"role": "assistant", "content": None, "refusal": None}), -1)

    def text(self, text: str, position: int) -> bytes:
        return self._pieces(self._parser.push(text), position)

    def finish(self, completion: Completion) -> bytes:
        position = completion.output_tokens - 1
        left = self._pieces(self._parser.end(), position)
        reason = chat_finish_reason(completion.finish_reason, self._parser.num_calls)
        return left + self._chunk(self._last_choice(reason), position)

    def _pieces(self, pieces: list[Piece], position: int) -> bytes:
        return b"".join(self._chunk(self._choice(self._delta(piece)), position) for piece in pieces)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        call: dict[str, Any] = {"index": piece.call}
        function: dict[str, str] = {"arguments": piece.arguments}
        if piece.name is not None:
            call |= {"id": tool_call_id("call", self._call_request_id, piece.call), "type": "function"}
            function = {"name": piece.name, **function}
        return {"tool_calls": [{**call, "function": function}]}


class ToolMessageFrames(MessageFrames):
    """/v1/messages: a block for each text and each call, in the order of the output."""

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
        return b"".join(self._piece(piece, position) for piece in self._parser.push(text))

    def done(self, completion: Completion) -> bytes:
        position = completion.output_tokens - 1
        left = b"".join(self._piece(piece, position) for piece in self._parser.end())
        return left + self._close(position) + self._end(completion, self._parser.num_calls)

    def _piece(self, piece: Piece, position: int) -> bytes:
        if isinstance(piece, str):
            opened = b"" if self._in_text else self._open({"type": "text", "text": ""}, position)
            self._in_text = True
            return opened + block_delta(self._index, {"type": "text_delta", "text": piece}, position)
        if piece.name is not None:
            call_id = tool_call_id("toolu", self._request_id, piece.call)
            self._in_text = False
            return self._open({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}, position)
        delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        return block_delta(self._index, delta, position)

    def _open(self, block: dict[str, Any], position: int) -> bytes:
        closed = self._close(position)
        self._index += 1
        return closed + block_start(self._index, block, position)

    def _close(self, position: int) -> bytes:
        return b"" if self._index < 0 else block_stop(self._index, position)
