"""A stream with tool calls that broke off behind any of its events: behind that id comes exactly the rest."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse
from gateway.sse_tools import ToolChatFrames, ToolGenerateFrames, ToolMessageFrames
from schemas.api.answers import tool_call_id
from schemas.api.tool_calls import CHAT_CALL, MESSAGE_CALL, parse_tool_calls
from schemas.records import Completion

RID = bytes(range(16))
PARTS = [
    "Hm.",
    " \n",
    "é <tool",
    "<tool_call>",
    "</tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"}\\" </tool_call>"}}\n</tool_call>',
    '<tool_call>{"arguments": {"a": [1, {}]}, "name": "other"}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city"',
    "{}",
]
OUTPUTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


class Event(NamedTuple):
    event_id: int | None
    data: dict[str, Any]


def events_of(body: bytes) -> list[Event]:
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if fields["data"].startswith("{") and fields.get("event") != "ping":
            event_id = fields.get("id")
            found.append(Event(None if event_id is None else int(event_id), json.loads(fields["data"])))
    return found


class Client:
    """What one has put together: the text, and of each call its id, name and arguments."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[list[str]] = []

    def take(self, events: Iterable[Event]) -> None:
        for _, data in events:
            if "choices" in data:
                self._chat(data["choices"][0]["delta"])
            elif data["type"] == "token":
                self._generate(data)
            elif data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
                self.calls.append([data["content_block"]["id"], data["content_block"]["name"], ""])
            elif data["type"] == "content_block_delta":
                self.text += data["delta"].get("text", "")
                if "partial_json" in data["delta"]:
                    self.calls[-1][2] += data["delta"]["partial_json"]

    def _chat(self, delta: dict[str, Any]) -> None:
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            self._call(call["index"], call.get("id"), call["function"])

    def _generate(self, data: dict[str, Any]) -> None:
        self.text += data["text"]
        for call in data.get("tool_calls", ()):
            self._call(call["index"], call.get("id"), call)

    def _call(self, index: int, call_id: str | None, function: dict[str, str]) -> None:
        if call_id is not None:
            assert index == len(self.calls)
            self.calls.append([call_id, function["name"], ""])
        self.calls[index][2] += function["arguments"]


def body_of(frames: sse.Frames, tokens: list[str], finish: str) -> bytes:
    """The last token of an output that stopped is not shown."""
    count = len(tokens) + (finish == "stop")
    completion = Completion(RID, 1, 0, 5, 3, 0, count, finish)
    shown = b"".join(frames.text(text, at) for at, text in enumerate(tokens) if text)
    return frames.first() + shown + frames.done(completion)


def frames_for(prefix: str) -> sse.Frames:
    if prefix == CHAT_CALL:
        return ToolChatFrames(RID, RID, "caller", 1_700_000_000, False)
    return ToolMessageFrames(RID, "caller", 3, lambda completion: None)


def last_id(events: list[Event]) -> int:
    return next((e.event_id for e in reversed(events) if e.event_id is not None), -1)


@pytest.mark.parametrize("prefix", [CHAT_CALL, MESSAGE_CALL])
@given(data=st.data(), output=OUTPUTS, finish=st.sampled_from(["stop", "length"]))
def test_every_delta_is_got_once(prefix: str, data: st.DataObject, output: str, finish: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=12).map(sorted))
    tokens = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    whole = events_of(body_of(frames_for(prefix), tokens, finish))
    said, calls = parse_tool_calls(output)
    expected = [[tool_call_id(prefix, RID, n), *call] for n, call in enumerate(calls)]
    client = Client()
    client.take(whole)
    assert (client.text, client.calls) == (said, expected)
    num_had = data.draw(st.integers(0, len(whole)))
    had = whole[:num_had]
    while had and had[-1].event_id is None:
        had = had[:-1]  # what came behind the last id comes again
    client = Client()
    client.take(had)
    client.take(events_of(body_of(ToolGenerateFrames(RID, prefix, last_id(had)), tokens, finish)))
    assert (client.text, client.calls) == (said, expected)


@given(output=OUTPUTS, finish=st.sampled_from(["stop", "length"]), data=st.data())
def test_what_is_read_again_can_break_off_again(output: str, finish: str, data: st.DataObject) -> None:
    tokens = list(output)
    client, after = Client(), -1
    for _ in range(3):
        rest = events_of(body_of(ToolGenerateFrames(RID, CHAT_CALL, after), tokens, finish))
        had = rest[: data.draw(st.integers(0, len(rest)))]
        client.take(had)
        after = max(after, last_id(had))
    client.take(events_of(body_of(ToolGenerateFrames(RID, CHAT_CALL, after), tokens, finish)))
    said, calls = parse_tool_calls(output)
    assert (client.text, [call[1:] for call in client.calls]) == (said, [list(call) for call in calls])
