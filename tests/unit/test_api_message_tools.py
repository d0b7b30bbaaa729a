"""Tools in Anthropic's bodies: turned into what OpenAI's say, or refused by name."""

import json
from typing import Any

import pytest

from schemas.api.bodies import ChatCompletionBody, convert_body, decode_body
from schemas.api.errors import ApiError
from schemas.api.messages import CountTokensBody, MessagesBody, count_tokens, prepare_messages
from schemas.api.prepare import Prepared, prepare
from tests.gateway_factories import MODEL
from tests.tool_model import TOOL_MODEL, WEATHER, tool_model

MODELS = {TOOL_MODEL: tool_model(), "simulated": MODEL}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "description": "Of a city", "input_schema": WEATHER["parameters"]}
OTHER = {"name": "stop", "input_schema": {"type": "object"}, "type": "custom"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
TEXT = {"type": "text", "text": "so"}
BODY: dict[str, Any] = {"model": TOOL_MODEL, "max_tokens": 99, "messages": [USER], "tools": [TOOL, OTHER]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def prepared(**changes: Any) -> Prepared:
    return prepare_messages(decode_body(json.dumps(BODY | changes).encode(), MessagesBody), MODELS)


def as_chat(messages: list[dict[str, Any]], **changes: Any) -> Prepared:
    functions = [WEATHER, {"name": "stop", "parameters": {"type": "object"}}]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"model": TOOL_MODEL, "messages": messages, "tools": tools, **changes}
    return prepare(convert_body(body, ChatCompletionBody), MODELS)


def test_turns_with_calls_and_results_are_the_prompt_of_a_chat() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = {"role": "assistant", "content": "so", "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "t1", "content": "sunny"}
    turns = [USER, assistant(TEXT, USE), user(RESULT, TEXT)]
    found = prepared(messages=turns)
    chat = as_chat([USER, said, told, {"role": "user", "content": "so"}])
    assert found.prompt_token_ids == chat.prompt_token_ids
    assert found.has_tools
    assert prepared(messages=[*turns[:2], user(RESULT)]).prompt_token_ids == (
        as_chat([USER, said, told]).prompt_token_ids
    )
    failed = prepared(messages=[*turns[:2], user({**RESULT, "is_error": True})])
    assert (
        failed.prompt_token_ids == as_chat([USER, said, {**told, "content": "Error: sunny"}]).prompt_token_ids
    )
    counted = {name: value for name, value in BODY.items() if name != "max_tokens"} | {"messages": turns}
    body = decode_body(json.dumps(counted).encode(), CountTokensBody)
    assert count_tokens(body, MODELS) == {"input_tokens": found.num_prompt_tokens}


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        (None, {}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "stop"},
            {"tool_choice": {"type": "function", "function": {"name": "stop"}}},
        ),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_a_choice_means_what_openais_means(choice: dict[str, Any] | None, chat: dict[str, Any]) -> None:
    found, expected = prepared(tool_choice=choice), as_chat([USER], **chat)
    assert found.sampling.grammar == expected.sampling.grammar
    assert (found.prompt_token_ids, found.has_tools) == (expected.prompt_token_ids, expected.has_tools)


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "simulated"}, "unsupported_field", "tools"),
    (
        {"model": "simulated", "tools": None, "messages": [USER, assistant(USE)]},
        "unsupported_field",
        "messages[1].content[0]",
    ),
    ({"tools": [{**TOOL, "type": "computer"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{**TOOL, "name": ""}]}, "invalid_value", "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
        "invalid_value",
        "tools[0].input_schema.type",
    ),
    (
        {"tools": [{**TOOL, "input_schema": {"properties": 3}}], "tool_choice": {"type": "any"}},
        "invalid_value",
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "some"}}, "invalid_value", "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "invalid_value", "tool_choice.name"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "invalid_value",
        "output_config.format",
    ),
    ({"messages": [user(USE)]}, "invalid_value", "messages[0].content[0]"),
    ({"messages": [USER, assistant(RESULT)]}, "invalid_value", "messages[1].content[0]"),
    ({"messages": [USER, assistant(USE), user(TEXT, RESULT)]}, "invalid_value", "messages[2].content[1]"),
    ({"messages": [user(RESULT)]}, "invalid_value", "messages[0].content[0].tool_use_id"),
    ({"messages": [USER, assistant(USE)]}, "invalid_value", "messages[1].content"),
    (
        {"messages": [USER, {"role": "assistant", "content": "I"}], "tool_choice": {"type": "any"}},
        "invalid_value",
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("changes", "code", "param"), REFUSALS)
def test_every_refusal_names_its_field(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as e:
        prepared(**changes)
    assert (e.value.status, e.value.code, e.value.param) == (400, code, param)
    assert param.split("[")[0].split(".")[0] in e.value.message
