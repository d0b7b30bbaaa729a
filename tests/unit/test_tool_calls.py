"""Tool calls in a model's output: what they are, however the output is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.api.tool_calls import CallPiece, Piece, ToolCall, ToolCallParser, collected, parse_tool_calls

WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": [1, {"a": "}"}]}}\n</tool_call>'
)
WEATHER_CALL = ToolCall("weather", '{"city": "Łódź", "days": [1, {"a": "}"}]}')
STOP = '<tool_call>{"name":"stop","arguments":{}}</tool_call>'
STOP_CALL = ToolCall("stop", "{}")

CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("", "", []),
    ("hello", "hello", []),
    (" hello \n", " hello \n", []),
    ("a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    (WEATHER, "", [WEATHER_CALL]),
    (f"\n\n{WEATHER}\n", "", [WEATHER_CALL]),
    (f"Let me look.\n{WEATHER}\n{STOP}\n", "Let me look.", [WEATHER_CALL, STOP_CALL]),
    (f"{STOP}\n and so", "and so", [STOP_CALL]),
    (f"a{STOP} b {STOP}c", "abc", [STOP_CALL, STOP_CALL]),
    # Other members' order, JSON in JSON, no arguments.
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [ToolCall("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [ToolCall("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
    # A closing tag in a string is part of the string.
    (
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>\\""}}</tool_call>',
        "",
        [ToolCall("f", '{"x": "</tool_call>\\""}')],
    ),
    # Cut off: by its limit, or before the closing tag.
    ('<tool_call>\n{"name": "f", "arguments": {"x": [1', "", [ToolCall("f", '{"x": [1')]),
    ('<tool_call>\n{"name": "f", "arguments": {"x": 1}', "", [ToolCall("f", '{"x": 1}')]),
    ('<tool_call>{"arguments": {}, "name": "f"}', "", [ToolCall("f", "{}")]),
    ('hm <tool_call>\n{"name": "f', 'hm <tool_call>\n{"name": "f', []),
    # None at all.
    (
        '<tool_call>{"name": "</tool_call>", "arguments": {}}',
        '<tool_call>{"name": "</tool_call>", "arguments": {}}',
        [],
    ),
    ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ('<tool_call>{"name": 3}</tool_call>!', '<tool_call>{"name": 3}</tool_call>!', []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_an_output_is_text_and_calls_wherever_it_is_cut(
    text: str, said: str | None, calls: list[ToolCall]
) -> None:
    expected = (text if said is None else said, calls)
    assert parse_tool_calls(text) == expected
    for at in range(len(text) + 1):
        assert in_pieces(text, [at]) == expected, text[:at]
    assert in_pieces(text, list(range(len(text)))) == expected


def in_pieces(text: str, cuts: list[int]) -> tuple[str, list[ToolCall]]:
    return collected(pieces_of(text, cuts))


def pieces_of(text: str, cuts: list[int]) -> list[Piece]:
    parser = ToolCallParser()
    bounds = [0, *cuts, len(text)]
    found: list[Piece] = []
    for start, end in pairwise(bounds):
        found += parser.push(text[start:end])
    return found + parser.end()


TEXTS = st.lists(
    st.sampled_from([WEATHER, STOP, "<tool_call>", "</tool_call>", "<tool", '{"name": "f", ', "é", " ", "\n"])
    | st.text(alphabet='{}[]"\\<>a ', max_size=4),
    max_size=8,
).map("".join)


@given(TEXTS, st.data())
@example("<tool_call></tool_call>", None)
def test_any_output_comes_to_the_same_however_it_is_cut(text: str, data: st.DataObject | None) -> None:
    whole = parse_tool_calls(text)
    cuts = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert in_pieces(text, cuts) == whole
    assert in_pieces(text, list(range(len(text)))) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


NAMES = st.from_regex("[a-zA-Z0-9_-]{1,64}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=6), JSON, max_size=3)), max_size=3))
def test_every_call_that_can_be_written_is_read(calls: list[tuple[str, dict[str, object]]]) -> None:
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    said, found = in_pieces(text, list(range(len(text))))
    assert said == ""
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_a_call_is_told_as_it_comes() -> None:
    parser = ToolCallParser()
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"x": ') == [CallPiece(0, "f", ""), CallPiece(0, None, '{"x": ')]
    assert parser.push('"long text') == [CallPiece(0, None, '"long text')]
    assert parser.push('"}}</tool_call> ') == [CallPiece(0, None, '"}')]
    assert parser.end() == []
    assert parser.num_calls == 1
