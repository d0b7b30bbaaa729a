"""Events of streams in which a model may call tools: its text is read as it comes."""

from typing import Any

from gateway.sse import ChatFrames
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
