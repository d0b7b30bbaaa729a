"""From a model's output to tool calls, as its text comes.

The format `hermes` (Hermes, Qwen): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several,
with or without text before them. Source: NousResearch, "Hermes Function Calling", README.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# How ids of calls begin, in OpenAI's API and in Anthropic's.
CHAT_CALL, MESSAGE_CALL = "call", "toolu"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class CallPiece(NamedTuple):
    """A part of the call `call`, from 0; `name` is in the first of them, `arguments` are JSON in pieces."""

    call: int
    name: str | None
    arguments: str


Piece = str | CallPiece


class ToolCall(NamedTuple):
    """`arguments` are JSON as the model wrote it: an output that was cut off may end within it."""

    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """The arguments; None for what is not the JSON of an object."""
        value = _json(self.arguments)
        return value if isinstance(value, dict) else None


class ToolCallParser:
    """`push` gives what is known by now, `end` the rest: in sum the same however the text is cut.

    Blanks around a call belong to the format and are left out. What begins like a call and is none is text.
    """

    __slots__ = ("_arguments", "_behind_call", "_blanks", "_body", "_closing", "_held", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # text that may belong to a call, or be blank before one
        self._behind_call = False  # nothing but blanks has come since
        self._blanks = ""  # before the call
        self._body: str | None = None  # of a call whose name is not known yet
        self._arguments: _Value | None = None  # of a call that is being told
        self._closing: str | None = None  # what follows the arguments

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest: str | None = text
        while rest is not None:
            if self._arguments is not None:
                rest = self._in_arguments(rest, pieces)
            elif self._closing is not None:
                rest = self._behind_arguments(rest)
            elif self._body is not None:
                rest = self._in_body(rest, pieces)
            else:
                rest = self._in_text(rest, pieces)
        return pieces

    def end(self) -> list[Piece]:
        """The output is over: a call that is whole but for its closing tag is one."""
        pieces: list[Piece] = []
        if self._body is not None:
            body, self._body = self._body, None
            self._whole_body(body, OPEN + body, pieces)
        else:
            held, self._held = self._held, ""
            self._say(held, pieces)
        return pieces

    def _in_text(self, text: str, pieces: list[Piece]) -> str | None:
        text = self._held + text
        before, opened, behind = text.partition(OPEN)
        if opened:
            said = before.rstrip()
            self._say(said, pieces)
            self._held, self._blanks, self._body = "", before[len(said) :], ""
            return behind
        shown = _shown_length(text)
        self._held = text[shown:]
        self._say(text[:shown], pieces)
        return None

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call = False
            pieces.append(text)

    def _in_body(self, text: str, pieces: list[Piece]) -> str | None:
        assert self._body is not None
        body = self._body + text
        head = _HEAD.match(body)
        # What closes the call in its head closes it, whatever of it has come by then.
        if head is not None and CLOSE not in head[0] and (name := _string(head[1])) is not None:
            pieces.append(self._begun(name))
            self._body, self._arguments = None, _Value()
            return body[head.end() :]
        inside, closed, behind = body.partition(CLOSE)
        if not closed:
            self._body = body
            return None
        self._body = None
        self._whole_body(inside, OPEN + inside + CLOSE, pieces)
        return behind

    def _in_arguments(self, text: str, pieces: list[Piece]) -> str | None:
        assert self._arguments is not None
        end = self._arguments.end_in(text)
        told = text if end is None else text[:end]
        if told:
            pieces.append(CallPiece(self.num_calls - 1, None, told))
        if end is None:
            return None
        self._arguments, self._closing = None, ""
        return text[end:]

    def _behind_arguments(self, text: str) -> str | None:
        assert self._closing is not None
        closing, closed, behind = (self._closing + text).partition(CLOSE)
        self._closing = None if closed else closing[-len(CLOSE) :]
        return behind if closed else None

    def _whole_body(self, body: str, as_text: str, pieces: list[Piece]) -> None:
        """A call that is not spelled as usual, its members in another order, say; or none at all."""
        call = _decoded(body)
        if call is None:
            self._say(self._blanks + as_text, pieces)
        else:
            pieces += [self._begun(call.name), CallPiece(self.num_calls - 1, None, call.arguments)]

    def _begun(self, name: str) -> CallPiece:
        self.num_calls += 1
        self._behind_call = True
        return CallPiece(self.num_calls - 1, name, "")


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """(what is said beside the calls, the calls) of a whole output."""
    parser = ToolCallParser()
    return collected([*parser.push(text), *parser.end()])


def collected(pieces: Iterable[Piece]) -> tuple[str, list[ToolCall]]:
    """The sum of pieces."""
    said = ""
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, str):
            said += piece
        elif piece.name is not None:
            calls.append(ToolCall(piece.name, piece.arguments))
        else:
            name, arguments = calls[piece.call]
            calls[piece.call] = ToolCall(name, arguments + piece.arguments)
    return said, calls


def merged(pieces: Iterable[Piece]) -> tuple[str, list[CallPiece]]:
    """What pieces add to the text, and to each call."""
    said = ""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        if isinstance(piece, str):
            said += piece
        else:
            known = calls.setdefault(piece.call, piece._replace(arguments=""))
            calls[piece.call] = known._replace(arguments=known.arguments + piece.arguments)
    return said, list(calls.values())


def _shown_length(text: str) -> int:
    """Characters up to where a call, or blanks before one, may have begun."""
    end = len(text)
    for length in range(min(len(OPEN) - 1, end), 0, -1):
        if text.endswith(OPEN[:length]):
            end -= length
            break
    return len(text[:end].rstrip())


class _Value:
    """Finds the end of a JSON object that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Where it ends in the next piece; None if not in this one."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if match is None:
                return None
            at = match.end()
            match match[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        return None


def _string(source: str) -> str | None:
    value = _json(source)
    return value if isinstance(value, str) else None


def _decoded(body: str) -> ToolCall | None:
    value = _json(body)
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # JSON in JSON
        return ToolCall(name, arguments) if isinstance(_json(arguments), dict) else None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _json(source: str) -> Any:
    """None for what is none."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None
