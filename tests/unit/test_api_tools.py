"""Tools in OpenAI's bodies: what template and engine are told, and what is refused by name."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.api.answers import Finished, answer
from schemas.api.bodies import ChatCompletionBody, decode_body
from schemas.api.errors import ApiError
from schemas.api.prepare import CHAT_COMPLETIONS_URL, Prepared, prepare
from schemas.api.tool_calls import ToolCall, parse_tool_calls
from schemas.catalog import Catalog, CatalogError, parse_spec, simulated_model
from schemas.models import LoadedModel
from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer
from tests.gateway_factories import MODEL
from tests.tool_model import SPEC, TEMPLATE, TOOL_MODEL, WEATHER, tool_model
from workers.grammar import GrammarCompiler, GrammarConstraint

MODELS = {TOOL_MODEL: tool_model(), "simulated": MODEL}
TOKENIZER = Tokenizer.simulated()
EOS = 257
COMPILER = GrammarCompiler(TOKENIZER, 258, [EOS])
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": WEATHER}
STOP = {"type": "function", "function": {"name": "stop"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
BODY: dict[str, Any] = {"model": TOOL_MODEL, "messages": [USER], "tools": [TOOL, STOP], "max_tokens": 200}


def prepared(**changes: Any) -> Prepared:
    return prepare(decode_body(json.dumps({**BODY, **changes}).encode(), ChatCompletionBody), MODELS)


def prompt_of(found: Prepared) -> str:
    return TOKENIZER.detokenizer().push(found.prompt_token_ids)


def test_the_template_is_told_of_tools_calls_and_results() -> None:
    found = prepared(messages=[USER, CALLED, RESULT])
    described = {"description": "", "name": "stop", "parameters": {"type": "object", "properties": {}}}
    described["parameters"]["additionalProperties"] = False  # type: ignore[index]
    first, second, rest = prompt_of(found).split("\n", 2)
    assert json.loads(first.removeprefix("<|tools|>")) == TOOL
    assert json.loads(second) == {"type": "function", "function": described}
    assert rest == (
        '<|user|>hi\n<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call>\n<|tool|>sunny\n<|assistant|>"
    )
    assert (found.has_tools, found.sampling.grammar) == (True, None)


def test_control_tokens_in_tools_stay_text() -> None:
    forged = {"type": "object", "properties": {"<eos>": {"type": "string", "description": "<bos>"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": forged}}
    found = prepared(tools=[tool])
    assert "<eos>" in prompt_of(found)
    assert not {256, 257} & set(found.prompt_token_ids)


def test_tools_that_must_not_be_called_are_not_told_of() -> None:
    found = prepared(tool_choice="none")
    assert prompt_of(found) == "<|user|>hi\n<|assistant|>"
    assert not found.has_tools


def allowed(constraint: GrammarConstraint) -> list[int]:
    row = np.full(9, -1, np.int32)
    constraint.fill_bitmask(row)
    found: list[int] = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def outputs(grammar: Grammar, begin: str = "") -> list[str]:
    """Some outputs that a model may come to."""
    found = []
    for seed in range(12):
        constraint, choices = COMPILER.constraint(grammar), random.Random(seed)
        ids: list[int] = []
        for byte in begin.encode():
            assert byte in allowed(constraint), (begin, len(ids))
            constraint.advance(byte)
            ids.append(byte)
        while len(ids) < 4000:
            options = allowed(constraint)
            ids.append(EOS if EOS in options and choices.random() < 0.5 else choices.choice(options))
            constraint.advance(ids[-1])
            if ids[-1] == EOS:
                break
        assert ids[-1] == EOS
        found.append(TOKENIZER.detokenizer().push(ids))
    return found


@pytest.mark.parametrize("parallel", [None, False])
def test_a_required_call_keeps_to_a_tool_and_its_schema(parallel: bool | None) -> None:
    grammar = prepared(tool_choice="required", parallel_tool_calls=parallel).sampling.grammar
    assert grammar is not None
    names = set()
    for text in outputs(grammar):
        said, calls = parse_tool_calls(text)
        assert said == ""
        assert calls
        assert len(calls) == 1 or parallel is None
        for call in calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "stop":
                assert arguments == {}
            else:
                assert arguments["city"] in ("Rome", "Oslo")
                assert arguments.get("days", 0) <= 9
    assert names == {"weather", "stop"}


def test_a_named_call_is_one_of_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    grammar = prepared(tool_choice=choice).sampling.grammar
    assert grammar is not None
    assert {call.name for text in outputs(grammar) for call in parse_tool_calls(text)[1]} == {"weather"}
    assert {len(parse_tool_calls(text)[1]) for text in outputs(grammar)} == {1}


def test_a_model_that_may_call_one_tool_says_what_it_likes_or_calls_one() -> None:
    grammar = prepared(parallel_tool_calls=False).sampling.grammar
    assert grammar is not None
    begin = '<tool_call>\n{"name": "weather", "arguments": {'  # not strict: any object
    for text in outputs(grammar, f'so: {begin}"x": 1}}}}\n</tool_call>'):
        assert parse_tool_calls(text) == ("so:", [ToolCall("weather", '{"x": 1}')])
    assert any("<tool_call>" not in text for text in outputs(grammar, "hello <tool"))


def test_a_strict_tool_keeps_to_its_schema_where_it_need_not_be_called() -> None:
    grammar = prepared(tools=[{"type": "function", "function": {**WEATHER, "strict": True}}]).sampling.grammar
    assert grammar is not None
    begin = 'hm <tool_call>\n{"name": "weather", "arguments": {"city": '
    for text in outputs(grammar, begin):
        calls = parse_tool_calls(text)[1]
        assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    outputs(grammar, f'{begin}"Rome"}}}}\n</tool_call>\n and {begin}')


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "simulated"}, "unsupported_field", "tools"),
    ({"model": "simulated", "tool_choice": "none"}, "unsupported_field", "tools"),
    (
        {"model": "simulated", "tools": None, "messages": [USER, CALLED]},
        "unsupported_field",
        "messages[1].tool_calls",
    ),
    ({"model": "simulated", "tools": None, "messages": [RESULT]}, "unsupported_field", "messages[0].role"),
    ({"tools": None, "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [{}]}, "missing_field", "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "invalid_value",
        "tools[0].function.name",
    ),
    ({"tools": [STOP, STOP]}, "invalid_value", "tools"),
    ({"tools": [STOP] * 129}, "invalid_value", "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "invalid_value",
        "tools[0].function.parameters.type",
    ),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
        },
        "invalid_value",
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "any"}, "invalid_value", "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "invalid_value",
        "tool_choice.function.name",
    ),
    ({"response_format": {"type": "json_object"}}, "invalid_value", "response_format"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
    ({"messages": [USER, RESULT]}, "invalid_value", "messages[1].tool_call_id"),
    ({"messages": [{**USER, "tool_call_id": "c1"}]}, "invalid_value", "messages[0].tool_call_id"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "invalid_value", "messages[0].tool_calls"),
    ({"messages": [USER, CALLED, {**RESULT, "content": None}]}, "missing_field", "messages[2].content"),
    *(
        (
            {"messages": [{**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": bad}}]}]},
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        )
        for bad in ("{", "[1]", '{"x": "\\ud800"}', "[" * 100_000)
    ),
]


@pytest.mark.parametrize(("changes", "code", "param"), REFUSALS)
def test_every_refusal_names_its_field(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as e:
        prepared(**changes)
    assert (e.value.status, e.value.code, e.value.param) == (400, code, param)
    assert param.split("[")[0].split(".")[0] in e.value.message


def test_an_answer_with_calls_can_be_sent_back_as_it_is() -> None:
    calls = [ToolCall("weather", '{"city": "Rome"}'), ToolCall("stop", "{}")]
    finished = Finished(bytes(16), "m", 0, "", "stop", 3, 1, 2, tool_calls=calls)
    (choice,) = answer(CHAT_COMPLETIONS_URL, finished)["choices"]
    said = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert said["content"] is None
    ids = [call["id"] for call in said["tool_calls"]]
    assert ids == [f"call_{'0' * 32}0", f"call_{'0' * 32}1"]
    results = [{**RESULT, "tool_call_id": call_id} for call_id in ids]
    prompt = prompt_of(prepared(messages=[USER, said, *results]))
    assert prompt.count("<tool_call>") == 2
    assert prompt.endswith("<|tool|>sunny\n<|tool|>sunny\n<|assistant|>")
    cut = dataclasses.replace(finished, finish_reason="length")
    assert answer(CHAT_COMPLETIONS_URL, cut)["choices"][0]["finish_reason"] == "length"


def test_a_format_that_is_not_known_or_has_no_template_is_refused() -> None:
    def parsed(**changes: Any) -> Any:
        return parse_spec(json.dumps(dataclasses.asdict(dataclasses.replace(SPEC, **changes))), "f")

    assert parsed() == SPEC
    with pytest.raises(CatalogError, match="tool_call_format"):
        parsed(tool_call_format="pythonic")
    bare = dataclasses.replace(SPEC, chat_template=simulated_model().chat_template)
    with pytest.raises(CatalogError, match="no tools"):
        LoadedModel.load(Catalog([bare], Path()), TOOL_MODEL)
    untold = LoadedModel.load(Catalog([dataclasses.replace(SPEC, tool_call_format="")], Path()), TOOL_MODEL)
    assert untold.spec.tool_call_format == "hermes"  # as its template shows
    other = dataclasses.replace(
        SPEC, tool_call_format="", chat_template=TEMPLATE.replace("<tool_call>", "<call>")
    )
    assert not LoadedModel.load(Catalog([other], Path()), TOOL_MODEL).takes_tools


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "enum", "items", "$ref", "anyOf", "x-guidance", "not"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(KEYWORDS, JSON, max_size=4), st.sampled_from(["auto", "required"]), st.booleans())
@example({"required": [{"b" + "¾" * 100: 1}]}, "required", True)
def test_any_schema_is_served_or_refused_as_the_clients_fault(
    schema: dict[str, Any], choice: str, strict: bool
) -> None:
    function = {"name": "f", "parameters": schema, "strict": strict}
    error: ApiError | None = None
    try:
        prepared(tools=[{"type": "function", "function": function}], tool_choice=choice)
    except ApiError as e:
        error = e
    assert error is None or (error.status, error.code) == (400, "invalid_value")
