"""Bodies of the APIs: what is good becomes one prepared request, what is bad names its field."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.answers import Finished, answer, output_text, visible_ids
from schemas.api.bodies import ChatCompletionBody, GenerateBody, convert_body, decode_body
from schemas.api.completions import CompletionBody
from schemas.api.errors import ApiError
from schemas.api.prepare import (
    CHAT_COMPLETIONS_URL,
    COMPLETIONS_URL,
    DEFAULT_MAX_TOKENS,
    GENERATE_URL,
    Body,
    prepare,
    prepare_choices,
)
from schemas.catalog import Catalog, simulated_model
from schemas.models import load_models
from schemas.priority import PriorityClass
from schemas.sampling import Grammar, LogitBias, SamplingParams

MODELS = load_models(Catalog([simulated_model()], Path()), ["simulated"])
GENERATE: dict[str, Any] = {"model": "simulated", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's response_format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def refused(kind: type[Body], body: Any) -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as e:
        prepare_choices(decode_body(data, kind), MODELS)
    return e.value


def test_a_prompt_is_tokenized_and_defaults_are_filled() -> None:
    prepared = prepare(decode_body(json.dumps(GENERATE).encode(), GenerateBody), MODELS)
    assert prepared.prompt_token_ids == [256, *b"hi"]
    assert (prepared.url, prepared.priority, prepared.stream) == (GENERATE_URL, None, False)
    assert (prepared.sampling.max_tokens, prepared.sampling.temperature) == (DEFAULT_MAX_TOKENS, 1.0)


def test_messages_go_through_the_models_template() -> None:
    chat = prepare(decode_body(json.dumps(CHAT).encode(), ChatCompletionBody), MODELS)
    generate = {"model": "simulated", "messages": CHAT["messages"], "priority": "batch"}
    native = prepare(decode_body(json.dumps(generate).encode(), GenerateBody), MODELS)
    assert bytes(chat.prompt_token_ids) == b"<|user|>hi\n<|assistant|>"
    assert native.prompt_token_ids == chat.prompt_token_ids
    assert native.priority is PriorityClass.BATCH


def test_two_requests_without_a_seed_get_two() -> None:
    body = decode_body(json.dumps(GENERATE).encode(), GenerateBody)
    assert prepare(body, MODELS).sampling.seed != prepare(body, MODELS).sampling.seed


def test_text_parts_and_the_developer_role_are_understood() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "simulated", "messages": [{"role": "developer", "content": parts}]}
    prepared = prepare(decode_body(json.dumps(body).encode(), ChatCompletionBody), MODELS)
    assert bytes(prepared.prompt_token_ids) == b"<|system|>ab\n<|assistant|>"


def test_an_answer_can_be_sent_back_as_it_is() -> None:
    finished = Finished(bytes(16), "m", 0, "yo", "stop", 3, 1, 2)
    said = answer(CHAT_COMPLETIONS_URL, finished)["choices"][0]["message"]
    body = {"model": "simulated", "messages": [*CHAT["messages"], said, *CHAT["messages"]]}
    prepared = prepare(convert_body(body, ChatCompletionBody), MODELS)
    assert bytes(prepared.prompt_token_ids) == b"<|user|>hi\n<|assistant|>yo\n<|user|>hi\n<|assistant|>"


REFUSALS: list[tuple[type[Body], Any, int, str, str | None]] = [
    (GenerateBody, b"", 400, "invalid_json", None),
    (GenerateBody, b"{", 400, "invalid_json", None),
    (GenerateBody, b"\xff\xfe", 400, "invalid_json", None),
    (
        ChatCompletionBody,
        b'{"response_format":{"json_schema":{"schema":{"x":' + b"[" * 100_000,
        400,
        "invalid_json",
        None,
    ),
    (GenerateBody, [], 400, "invalid_value", "body"),
    (GenerateBody, {}, 400, "missing_field", "model"),
    (GenerateBody, {"model": "simulated"}, 400, "invalid_value", "prompt"),
    (GenerateBody, {**GENERATE, "messages": CHAT["messages"]}, 400, "invalid_value", "prompt"),
    (GenerateBody, {**GENERATE, "model": "gpt-9"}, 404, "model_not_found", "model"),
    (GenerateBody, {**GENERATE, "prompt": 3}, 400, "invalid_value", "prompt"),
    (GenerateBody, {**GENERATE, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (GenerateBody, {**GENERATE, "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
    (GenerateBody, {**GENERATE, "max_tokens": True}, 400, "invalid_value", "max_tokens"),
    (GenerateBody, {**GENERATE, "max_tokens": 40_000}, 400, "context_length_exceeded", "max_tokens"),
    (GenerateBody, {**GENERATE, "prompt": "x" * 40_000}, 400, "context_length_exceeded", "prompt"),
    (GenerateBody, {**GENERATE, "temperature": -1}, 400, "invalid_value", "temperature"),
    (GenerateBody, {**GENERATE, "top_p": 0}, 400, "invalid_value", "top_p"),
    (GenerateBody, {**GENERATE, "top_k": -1}, 400, "invalid_value", "top_k"),
    (GenerateBody, {**GENERATE, "seed": 2**64}, 400, "invalid_value", "seed"),
    (GenerateBody, {**GENERATE, "priority": "vip"}, 400, "invalid_value", "priority"),
    (GenerateBody, {**GENERATE, "temprature": 1}, 400, "unknown_field", "temprature"),
    (GenerateBody, {**GENERATE, "stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids[0]"),
    (ChatCompletionBody, {**CHAT, "messages": []}, 400, "invalid_value", "messages"),
    (
        ChatCompletionBody,
        {**CHAT, "messages": [{"role": "user"}]},
        400,
        "missing_field",
        "messages[0].content",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "messages": [{"role": "robot", "content": "x"}]},
        400,
        "invalid_value",
        "messages[0].role",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "messages": [{"role": "user", "content": "x" * 40_000}]},
        400,
        "context_length_exceeded",
        "messages",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        400,
        "missing_field",
        "messages[0].tool_calls[0].id",
    ),
    (ChatCompletionBody, {**CHAT, "n": 17}, 400, "invalid_value", "n"),
    (ChatCompletionBody, {**CHAT, "stop": list("abcde")}, 400, "invalid_value", "stop"),
    (ChatCompletionBody, {**CHAT, "stop": ""}, 400, "invalid_value", "stop"),
    (GenerateBody, {**GENERATE, "stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    (GenerateBody, {**GENERATE, "min_p": 1.1}, 400, "invalid_value", "min_p"),
    (GenerateBody, {**GENERATE, "presence_penalty": -2.1}, 400, "invalid_value", "presence_penalty"),
    (GenerateBody, {**GENERATE, "repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
    (GenerateBody, {**GENERATE, "max_tokens": 4, "min_tokens": 5}, 400, "invalid_value", "min_tokens"),
    (GenerateBody, {**GENERATE, "logit_bias": {"300": 1}}, 400, "invalid_value", "logit_bias"),
    (GenerateBody, {**GENERATE, "logit_bias": {"01": 1}}, 400, "invalid_value", "logit_bias"),
    (ChatCompletionBody, {**CHAT, "logit_bias": {"3": 101}}, 400, "invalid_value", "logit_bias[...]"),
    (GenerateBody, {**GENERATE, "regex": "a("}, 400, "invalid_value", "regex"),
    (GenerateBody, {**GENERATE, "regex": ""}, 400, "invalid_value", "regex"),
    (GenerateBody, {**GENERATE, "stop_token_ids": [1, 258]}, 400, "invalid_value", "stop_token_ids[1]"),
    (GenerateBody, {**GENERATE, "top_k": 2**63}, 400, "invalid_value", "top_k"),
    (GenerateBody, {**GENERATE, "regex": "a" * 70_000}, 400, "invalid_value", "regex"),
    (
        GenerateBody,
        {**GENERATE, "regex": "a", "response_format": {"type": "json_object"}},
        400,
        "invalid_value",
        "regex",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "response_format": {"type": "json_schema"}},
        400,
        "invalid_value",
        "response_format.json_schema",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "response_format": json_schema({"type": "objectx"})},
        400,
        "invalid_value",
        "response_format.json_schema.schema",
    ),
    (ChatCompletionBody, {**CHAT, "tools": [{}]}, 400, "missing_field", "tools[0].type"),
    (ChatCompletionBody, {**CHAT, "store": True}, 400, "unsupported_field", "store"),
    (ChatCompletionBody, {**CHAT, "logprobs": 1}, 400, "invalid_value", "logprobs"),
    (
        ChatCompletionBody,
        {**CHAT, "logprobs": True, "top_logprobs": 21},
        400,
        "invalid_value",
        "top_logprobs",
    ),
    (ChatCompletionBody, {**CHAT, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    (ChatCompletionBody, {**CHAT, "service_tier": "flex"}, 400, "invalid_value", "service_tier"),
    (ChatCompletionBody, {**CHAT, "reasoning_effort": "high"}, 400, "invalid_value", "reasoning_effort"),
    (ChatCompletionBody, {**CHAT, "modalities": ["audio"]}, 400, "invalid_value", "modalities[0]"),
    (
        ChatCompletionBody,
        {**CHAT, "stream_options": {"continuous_usage_stats": True}},
        400,
        "invalid_value",
        "stream_options.continuous_usage_stats",
    ),
    (CompletionBody, {"model": "simulated"}, 400, "missing_field", "prompt"),
    (CompletionBody, {**GENERATE, "prompt": []}, 400, "invalid_value", "prompt"),
    (CompletionBody, {**GENERATE, "prompt": ["a"] * 33}, 400, "invalid_value", "prompt"),
    (CompletionBody, {**GENERATE, "prompt": ["a"] * 9, "n": 4}, 400, "invalid_value", "prompt"),
    (CompletionBody, {**GENERATE, "prompt": ["a", 3]}, 400, "invalid_value", "prompt"),
    (CompletionBody, {**GENERATE, "prompt": [[1], [2, 258]]}, 400, "invalid_value", "prompt[1][1]"),
    (
        CompletionBody,
        {**GENERATE, "prompt": ["a", "x" * 40_000]},
        400,
        "context_length_exceeded",
        "prompt[1]",
    ),
    (CompletionBody, {**GENERATE, "prompt": [[]]}, 400, "invalid_value", "prompt[0]"),
    (CompletionBody, {**GENERATE, "prompt": [1, 258]}, 400, "invalid_value", "prompt[1]"),
    (CompletionBody, {**GENERATE, "prompt": [1, True]}, 400, "invalid_value", "prompt[1]"),
    (CompletionBody, {**GENERATE, "prompt": "x" * 40_000}, 400, "context_length_exceeded", "prompt"),
    (CompletionBody, {**GENERATE, "max_tokens": 40_000}, 400, "context_length_exceeded", "max_tokens"),
    (CompletionBody, {**GENERATE, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (CompletionBody, {**GENERATE, "echo": True}, 400, "unsupported_field", "echo"),
    (CompletionBody, {**GENERATE, "suffix": "x"}, 400, "unsupported_field", "suffix"),
    (CompletionBody, {**GENERATE, "n": 0}, 400, "invalid_value", "n"),
    (CompletionBody, {**GENERATE, "best_of": 2}, 400, "invalid_value", "best_of"),
    (CompletionBody, {**GENERATE, "best_of": 2, "n": 3}, 400, "invalid_value", "best_of"),
    (CompletionBody, {**GENERATE, "logprobs": 6}, 400, "invalid_value", "logprobs"),
    (CompletionBody, {**GENERATE, "messages": []}, 400, "unknown_field", "messages"),
    (ChatCompletionBody, {**CHAT, "frequency_penalty": 3}, 400, "invalid_value", "frequency_penalty"),
    (
        ChatCompletionBody,
        {**CHAT, "response_format": {"type": "xml"}},
        400,
        "invalid_value",
        "response_format.type",
    ),
    (
        ChatCompletionBody,
        {**CHAT, "max_completion_tokens": 40_000},
        400,
        "context_length_exceeded",
        "max_completion_tokens",
    ),
]


@pytest.mark.parametrize(("kind", "body", "status", "code", "param"), REFUSALS)
def test_every_refusal_names_its_field(
    kind: type[Body], body: Any, status: int, code: str, param: str | None
) -> None:
    error = refused(kind, body)
    assert (error.status, error.code, error.param) == (status, code, param)
    if param and param != "body":
        assert param.split("[")[0].split(".")[0] in error.message


def test_values_that_ask_for_nothing_are_accepted() -> None:
    body = CHAT | {
        "n": 1,
        "stop": None,
        "tools": [],
        "tool_choice": "none",
        "logprobs": False,
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "stream": None,
        "stream_options": {"include_usage": True},
        "top_logprobs": 0,
        "store": False,
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "reasoning_effort": "none",
    }
    prepared = prepare(decode_body(json.dumps(body).encode(), ChatCompletionBody), MODELS)
    assert (prepared.stream, prepared.include_usage) == (False, True)


def test_all_that_steers_sampling_reaches_the_engine() -> None:
    body = GENERATE | {
        "max_tokens": 9,
        "stop": "END",
        "min_tokens": 2,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"65": -100, "66": 3.5},
        "regex": "[0-9]+",
        "seed": 4,
    }
    sampling = prepare(convert_body(body, GenerateBody), MODELS).sampling
    assert sampling == SamplingParams(
        max_tokens=9,
        seed=4,
        stop=["END"],
        min_tokens=2,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias=[LogitBias(65, -100.0), LogitBias(66, 3.5)],
        grammar=Grammar("regex", "[0-9]+"),
    )


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        (json_schema({"type": "integer"}), {"type": "integer"}),
        ({"type": "json_schema", "json_schema": {"name": "any"}}, {}),
    ],
)
def test_a_response_format_becomes_a_grammar(wanted: dict[str, Any], schema: dict[str, Any]) -> None:
    kinds: tuple[tuple[type[Any], dict[str, Any]], ...] = (
        (ChatCompletionBody, CHAT),
        (GenerateBody, GENERATE),
    )
    for kind, good in kinds:
        grammar = prepare(convert_body(good | {"response_format": wanted}, kind), MODELS).sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)


def test_a_model_without_a_template_takes_prompts_only() -> None:
    model = MODELS["simulated"]
    bare = {"simulated": type(model)(model.spec, model.tokenizer, None)}
    with pytest.raises(ApiError, match="no chat template"):
        prepare(convert_body(CHAT, ChatCompletionBody), bare)
    assert prepare(convert_body(GENERATE, GenerateBody), bare).prompt_token_ids == [256, *b"hi"]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [256, *b"hi"]),
        (["hi"], [256, *b"hi"]),
        ([104, 105], [104, 105]),
        ([[104, 105]], [104, 105]),
        ([256], [256]),
    ],
)
def test_a_completion_prompt_is_text_or_ids(prompt: Any, ids: list[int]) -> None:
    prepared = prepare(convert_body({"model": "simulated", "prompt": prompt}, CompletionBody), MODELS)
    assert (prepared.prompt_token_ids, prepared.url) == (ids, COMPLETIONS_URL)
    assert (prepared.sampling.max_tokens, prepared.sampling.logprobs) == (16, None)


def test_log_probabilities_are_asked_of_the_worker() -> None:
    def asked(kind: type[Body], **body: Any) -> int | None:
        return prepare(convert_body({"model": "simulated", **body}, kind), MODELS).sampling.logprobs

    assert asked(CompletionBody, prompt="a", logprobs=0) == 0
    assert asked(CompletionBody, prompt="a", logprobs=5) == 5
    assert asked(ChatCompletionBody, messages=CHAT["messages"], logprobs=True) == 0
    assert asked(ChatCompletionBody, messages=CHAT["messages"], logprobs=True, top_logprobs=20) == 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KINDS: list[tuple[type[Body], dict[str, Any]]] = [
    (GenerateBody, GENERATE),
    (ChatCompletionBody, CHAT),
    (CompletionBody, GENERATE),
]
FIELDS = sorted({name for kind, _ in KINDS for name in kind.__struct_fields__})


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_served_or_refused_as_the_clients_fault(
    form: tuple[type[Body], dict[str, Any]], change: Any
) -> None:
    kind, good = form
    error: ApiError | None = None
    try:
        prepare(decode_body(json.dumps(good | change).encode(), kind), MODELS)
    except ApiError as e:
        error = e
    assert error is None or (error.status in (400, 404) and error.message)


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_as_the_clients_fault(data: bytes) -> None:
    assert refused(ChatCompletionBody, data).status == 400


def test_the_token_that_stopped_the_output_is_not_shown() -> None:
    assert visible_ids([1, 2, 3], "stop") == [1, 2]
    assert visible_ids([1, 2, 3], "length") == [1, 2, 3]
    assert output_text(MODELS["simulated"].tokenizer, [*b"hi!"], "stop") == "hi"


def test_text_ends_before_the_stop_string_that_stopped_it() -> None:
    tokenizer = MODELS["simulated"].tokenizer
    assert output_text(tokenizer, [*"añ STOP".encode()], "stop", 3) == "añ "
    assert output_text(tokenizer, [*b"STOP"], "stop", 0) == ""


def test_answers_have_the_shapes_of_their_apis() -> None:
    finished = Finished(bytes(16), "m", 1_700_000_000, "hi", "stop", 3, 1, 2)
    assert answer(GENERATE_URL, finished) == {
        "id": "0" * 32,
        "model": "m",
        "text": "hi",
        "usage": {"input_tokens": 3, "cached_tokens": 1, "output_tokens": 2},
        "stop_reason": "stop",
    }
    completion = answer(COMPLETIONS_URL, finished)
    assert (completion["object"], completion["id"]) == ("text_completion", "cmpl-" + "0" * 32)
    chat = answer(CHAT_COMPLETIONS_URL, finished)
    assert chat["choices"][0]["message"]["content"] == "hi"
    assert chat["usage"]["total_tokens"] == 5
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    waits = [ApiError(429, "c", "m", retry_after_ms=ms).retry_after_s() for ms in (None, 0, 1, 1000, 1001)]
    assert waits == [None, 1, 1, 1, 2]
