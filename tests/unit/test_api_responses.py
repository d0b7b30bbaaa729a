"""Bodies of /v1/responses: what they ask for, and that a refusal names the field."""

import json
from typing import Any

import pytest

from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared
from schemas.api.response_object import created_response
from schemas.api.responses import ResponsesBody, prepare_response
from tests.gateway_factories import MODEL

BODY = {"model": "simulated", "input": "hi"}
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
}


def decoded(**changes: Any) -> ResponsesBody:
    return decode_body(json.dumps({**BODY, **changes}).encode(), ResponsesBody)


def prepared(**changes: Any) -> Prepared:
    return prepare_response(decoded(**changes), {"simulated": MODEL})


def prompt(**changes: Any) -> str:
    return MODEL.tokenizer.detokenizer().push(prepared(**changes).prompt_token_ids)


def test_a_text_is_what_a_user_says() -> None:
    assert prompt() == prompt(input=[{"role": "user", "content": "hi"}])
    assert prompt() == prompt(
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    )


def test_an_answer_is_sent_back_as_it_came() -> None:
    user, again = {"role": "user", "content": "a?"}, {"role": "user", "content": "b?"}
    plain = {"role": "assistant", "content": "yes"}
    assert prompt(input=[user, ANSWER, again]) == prompt(input=[user, plain, again])


def test_instructions_come_first_and_make_one_system_message() -> None:
    user = {"role": "user", "content": "hi"}
    system = {"role": "developer", "content": "B"}
    assert prompt(instructions="A") == prompt(input=[{"role": "system", "content": "A"}, user])
    assert prompt(instructions="A", input=[system, user]) == prompt(
        input=[{"role": "system", "content": "A\n\nB"}, user]
    )


def test_sampling_and_its_defaults() -> None:
    plain = prepared().sampling
    assert (plain.max_tokens, plain.temperature, plain.top_p) == (1024, 1.0, 1.0)
    assert (plain.logprobs, plain.grammar) == (None, None)
    asked = prepared(
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=3,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}},
    ).sampling
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.seed) == (7, 0.0, 0.5, 3)
    assert asked.logprobs == 2
    assert asked.grammar is not None
    assert json.loads(asked.grammar.source) == {"type": "integer"}
    assert prepared(text={"format": {"type": "json_object"}}).sampling.grammar is not None


def test_what_asks_for_nothing_is_fine() -> None:
    prepared(
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "none", "summary": None},
        truncation="disabled",
        service_tier="auto",
        include=[],
        text={"format": {"type": "text"}},
        previous_response_id=None,
        conversation=None,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
    )


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_field", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_field", "conversation"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_field", "tools"),
        ({"tool_choice": "required"}, "unsupported_field", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "unsupported_field", "tool_choice"),
        ({"max_tool_calls": 1}, "unsupported_field", "max_tool_calls"),
        ({"prompt": {"id": "p"}}, "unsupported_field", "prompt"),
        ({"reasoning": {"effort": "high"}}, "invalid_value", "reasoning.effort"),
        ({"truncation": "auto"}, "invalid_value", "truncation"),
        ({"service_tier": "flex"}, "invalid_value", "service_tier"),
        ({"include": ["reasoning.encrypted_content"]}, "invalid_value", "include[0]"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"stream_options": {"include_obfuscation": False}}, "invalid_value", "stream_options"),
        ({"text": {"format": {"type": "grammar"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
            "invalid_value",
            "text.format.schema",
        ),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            "invalid_value",
            "input[0].type",
        ),
        ({"metadata": {"a": "b" * 513}}, "invalid_value", "metadata[...]"),
        ({"input": "a" * 40_000}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 32_768}, "context_length_exceeded", "max_output_tokens"),
        ({"model": "gpt-9"}, "model_not_found", "model"),
        ({"messages": []}, "unknown_field", "messages"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        prepared(**changes)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_what_was_asked_is_echoed() -> None:
    created = created_response(
        decoded(instructions="A", metadata={"k": "v"}, temperature=0.5, background=True, user="u"),
        "resp_x",
        9,
    )
    assert created["status"] == "queued"
    assert (created["id"], created["created_at"], created["store"]) == ("resp_x", 9, True)
    assert (created["metadata"], created["user"], created["instructions"]) == ({"k": "v"}, "u", "A")
    assert (created["temperature"], created["top_p"], created["max_output_tokens"]) == (0.5, 1.0, None)
    assert created["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
