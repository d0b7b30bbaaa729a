"""Bodies of Anthropic's API: what is good becomes a prompt, what is bad names its field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.answers import Finished, answer, message_stop, stop_sequence
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.messages import CountTokensBody, MessagesBody, count_tokens, prepare_messages
from schemas.api.prepare import MESSAGES_URL, Prepared
from schemas.priority import PriorityClass
from schemas.sampling import SamplingParams
from tests.gateway_factories import MODEL

MODELS = {"simulated": MODEL}
USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "simulated", "max_tokens": 8, "messages": [USER]}


def prepared(**changes: Any) -> Prepared:
    return prepare_messages(decode_body(json.dumps(BODY | changes).encode(), MessagesBody), MODELS)


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, b"<|user|>hi\n<|assistant|>"),
        ({"system": "be kind"}, b"<|system|>be kind\n<|user|>hi\n<|assistant|>"),
        ({"system": ""}, b"<|user|>hi\n<|assistant|>"),
        (
            {
                "system": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ]
            },
            b"<|system|>ab\n<|user|>hi\n<|assistant|>",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "yo"}, USER]},
            b"<|user|>hi\n<|assistant|>yo\n<|user|>hi\n<|assistant|>",
        ),
        ({"messages": [USER, USER]}, b"<|user|>hi\nhi\n<|assistant|>"),
        ({"messages": [USER, {"role": "assistant", "content": "I am"}]}, b"<|user|>hi\n<|assistant|>I am"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, b"<|user|>hi\n<|assistant|>"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": None}]}]},
            b"<|user|>x\n<|assistant|>",
        ),
    ],
)
def test_a_conversation_becomes_a_prompt_and_counts_as_much(changes: dict[str, Any], prompt: bytes) -> None:
    found = prepared(**changes)
    assert bytes(found.prompt_token_ids) == prompt
    assert (found.url, found.num_prompt_tokens) == (MESSAGES_URL, len(prompt))
    body = {name: value for name, value in (BODY | changes).items() if name != "max_tokens"}
    asked = decode_body(json.dumps(body).encode(), CountTokensBody)
    assert count_tokens(asked, MODELS) == {"input_tokens": len(prompt)}


def test_all_that_steers_sampling_reaches_the_engine() -> None:
    found = prepared(
        stop_sequences=["A", "B"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        tools=[],
        tool_choice={"type": "none"},
        priority="batch",
    )
    assert found.sampling == SamplingParams(
        max_tokens=8, temperature=0.5, top_p=0.9, top_k=7, stop=["A", "B"], seed=found.sampling.seed
    )
    assert (found.stream, found.priority) == (True, PriorityClass.BATCH)


def test_an_output_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    grammar = prepared(output_config=config).sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)
    assert prepared(output_config={}).sampling.grammar is None


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "invalid_value", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": 40_000}, "context_length_exceeded", "max_tokens"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [USER, {"role": "assistant", "content": "x "}]}, "invalid_value", "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "context_length_exceeded", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    ({"system": 3}, "invalid_value", "system"),
    ({"temperature": 1.5}, "invalid_value", "temperature"),
    ({"top_p": 2}, "invalid_value", "top_p"),
    ({"top_k": -1}, "invalid_value", "top_k"),
    ({"stop_sequences": [""]}, "invalid_value", "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "invalid_value", "stop_sequences"),
    ({"metadata": {"user": "u"}}, "unknown_field", "metadata.user"),
    ({"service_tier": "priority"}, "invalid_value", "service_tier"),
    ({"priority": "vip"}, "invalid_value", "priority"),
    ({"tools": [{"name": "t", "input_schema": {}}]}, "unsupported_field", "tools"),
    ({"tools": [{"name": "t"}]}, "missing_field", "tools[0].input_schema"),
    ({"tool_choice": {"type": "auto"}}, "invalid_value", "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "invalid_value", "thinking.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "unknown_field", "cache_control.ttl"),
    ({"container": "c"}, "unknown_field", "container"),
    ({"output_config": {"effort": "low"}}, "invalid_value", "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "objectx"}}}},
        "invalid_value",
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("changes", "code", "param"), REFUSALS)
def test_every_refusal_names_its_field(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as e:
        prepared(**changes)
    assert (e.value.status, e.value.code, e.value.param) == (400, code, param)
    assert param.split("[")[0].split(".")[0] in e.value.message


def test_max_tokens_is_required() -> None:
    with pytest.raises(ApiError) as e:
        decode_body(json.dumps({"model": "simulated", "messages": [USER]}).encode(), MessagesBody)
    assert (e.value.code, e.value.param) == ("missing_field", "max_tokens")


def test_counting_takes_no_max_tokens() -> None:
    with pytest.raises(ApiError) as e:
        decode_body(json.dumps(BODY).encode(), CountTokensBody)
    assert (e.value.code, e.value.param) == ("unknown_field", "max_tokens")


def test_a_model_without_a_template_has_no_messages() -> None:
    bare = {"simulated": type(MODEL)(MODEL.spec, MODEL.tokenizer, None)}
    with pytest.raises(ApiError, match="no chat template"):
        prepare_messages(decode_body(json.dumps(BODY).encode(), MessagesBody), bare)


def test_why_a_message_ended() -> None:
    assert stop_sequence("ENDING", ["X", "ENDI", "END"]) == "END"
    assert stop_sequence("", ["X"]) is None
    assert message_stop("length", None) == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert message_stop("stop", None) == {"stop_reason": "end_turn", "stop_sequence": None}
    assert message_stop("stop", "END") == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_whole_answer_tells_cached_tokens_apart() -> None:
    finished = Finished(bytes(16), "m", 0, "hi", "length", 33, 32, 2)
    assert answer(MESSAGES_URL, finished) == {
        "id": "msg_" + "0" * 32,
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 32,
            "output_tokens": 2,
        },
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(MessagesBody.__struct_fields__), JSON, max_size=4))
def test_any_json_is_served_or_refused_as_the_clients_fault(change: dict[str, Any]) -> None:
    error: ApiError | None = None
    try:
        prepared(**change)
    except ApiError as e:
        error = e
    assert error is None or (error.status in (400, 404) and error.message)
