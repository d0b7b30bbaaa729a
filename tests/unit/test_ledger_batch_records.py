"""Batch records in and out; every bad one is an answer that names the field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.answers import Finished, answer
from schemas.api.errors import ApiError
from schemas.catalog import Catalog
from schemas.codec import decode, encode
from schemas.models import LoadedModel, load_models
from schemas.records import BatchRequest, BatchResult, Retry
from streams.ledger.batch_item import BatchItem, Shape, Source
from streams.ledger.batch_records import (
    MAX_ANSWER_BYTES,
    BadRecord,
    encode_answer,
    encode_error,
    parse,
)

MODELS: dict[str, LoadedModel] = load_models(Catalog.load(Path("none")), ["simulated"])
GENERATE = {"custom_id": "a", "model": "simulated", "prompt": "hi", "max_tokens": 3}
CHAT_BODY = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE_BODY = {"model": "simulated", "input": "hi"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT_BODY}


def read(
    value: Any, tenant: str = "demo", offset: int = 7, headers: list[tuple[str, bytes | None]] | None = None
) -> BatchItem | BadRecord:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse(data, tenant, offset, 1_000, MODELS, headers=headers or [])


def item(value: Any, **where: Any) -> BatchItem:
    found = read(value, **where)
    assert isinstance(found, BatchItem), found
    return found


def test_a_generate_record() -> None:
    found = item(GENERATE)
    assert (found.source, found.url, found.accepted_at) == (
        Source("demo", 7, "a", Shape.GENERATE),
        "/v1/generate",
        1_000,
    )
    assert found.prompt_token_ids == [256, 104, 105]
    assert found.sampling.max_tokens == 3


def test_a_batch_file_line_and_an_avro_record() -> None:
    assert item(LINE).source == Source("demo", 7, "a", Shape.LINE)
    without_method = {k: v for k, v in LINE.items() if k != "method"}
    assert item(without_method).request_id == item(LINE).request_id
    avro = encode(BatchRequest("a", json.dumps({k: v for k, v in GENERATE.items() if k != "custom_id"})))
    assert item(avro).source == Source("demo", 7, "a", Shape.AVRO)
    assert item(avro).request_id != item(GENERATE).request_id  # each is answered in its own encoding


def test_a_completion_is_a_line_like_any_other() -> None:
    found = item({**LINE, "url": "/v1/completions", "body": {"model": "simulated", "prompt": [104]}})
    assert (found.url, found.prompt_token_ids, found.sampling.max_tokens) == ("/v1/completions", [104], 16)
    line = json.loads(
        encode_answer(Source("demo", 7, "a", Shape.LINE), found.request_id, answer(found.url, FINISHED))
    )
    assert line["response"]["body"]["object"] == "text_completion"


def test_a_producers_retry_is_the_same_request_and_other_work_is_not() -> None:
    base = item(GENERATE)
    assert item(dict(reversed(GENERATE.items())), offset=9).request_id == base.request_id
    others = [
        item({**GENERATE, "custom_id": "b"}),
        item({**GENERATE, "prompt": "ho"}),
        item(GENERATE, tenant="other"),
    ]
    assert len({base.request_id, *(other.request_id for other in others)}) == 4
    assert item(GENERATE).sampling.seed == base.sampling.seed  # not random: it survives a restart
    assert item({**GENERATE, "seed": 5}).sampling.seed == 5


def test_a_header_groups_records_into_batches() -> None:
    def grouped(group: bytes | None) -> BatchItem:
        return item(GENERATE, headers=[("other", None), ("batch", group)])

    assert grouped(b"night").source == Source("demo", 7, "a", Shape.GENERATE, "night")
    assert grouped(b"night").request_id == grouped(b"night").request_id
    assert len({grouped(group).request_id for group in (b"night", b"day", None)}) == 3
    assert grouped(None).request_id == grouped(b"").request_id == item(GENERATE).request_id
    too_long = read(GENERATE, headers=[("batch", b"x" * 513)])
    assert isinstance(too_long, BadRecord)
    assert (too_long.error.param, too_long.source.custom_id) == ("header batch", "a")
    assert too_long.source.group == "x" * 512
    # What cannot be read is told to its batch all the same.
    assert read(b"{", headers=[("batch", b"\xff")]).source == Source(
        "demo", 7, group="\N{REPLACEMENT CHARACTER}"
    )


def test_an_answer_that_no_record_can_hold_is_an_error() -> None:
    body = {"text": "x" * MAX_ANSWER_BYTES}
    for shape in Shape:
        value = encode_answer(Source("demo", 1, "a", shape), bytes(16), body)
        assert len(value) < 1_000
        assert b"answer_too_large" in value


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b"\xc3\x01garbage!", "invalid_avro", None),
        (encode(Retry(bytes(16), 1, 1, "x")), "invalid_avro", None),
        (encode(BatchRequest("a", "{no")), "invalid_json", "body"),
        ({**GENERATE, "custom_id": None}, "missing_field", "custom_id"),
        ({**GENERATE, "custom_id": 5}, "invalid_value", "custom_id"),
        ({**GENERATE, "custom_id": ""}, "invalid_value", "custom_id"),
        ({**GENERATE, "custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({**GENERATE, "stream": True}, "invalid_value", "stream"),
        ({**GENERATE, "priority": "free"}, "invalid_value", "priority"),
        ({**GENERATE, "priority": "nope"}, "invalid_value", "priority"),
        ({**GENERATE, "temperature": 9}, "invalid_value", "temperature"),
        ({**GENERATE, "colour": "red"}, "unknown_field", "colour"),
        ({**GENERATE, "model": "gpt-9"}, "model_not_found", "model"),
        ({**GENERATE, "max_tokens": 10**6}, "context_length_exceeded", "max_tokens"),
        ({**GENERATE, "prompt": "x" * (7 << 20)}, "context_length_exceeded", "prompt"),
        (
            {**LINE, "body": {**CHAT_BODY, "messages": [{"role": "user", "content": "x" * (7 << 20)}]}},
            "context_length_exceeded",
            "messages",
        ),
        ({**LINE, "url": "/v1/embeddings"}, "invalid_value", "url"),
        ({**LINE, "url": ["x"]}, "invalid_value", "url"),
        ({**LINE, "method": "GET"}, "invalid_value", "method"),
        ({**LINE, "extra": 1}, "unknown_field", "extra"),
        ({**LINE, "body": "text"}, "invalid_value", "body"),
        ({"custom_id": "a", "url": "/v1/generate"}, "missing_field", "body"),
        ({**LINE, "body": {**CHAT_BODY, "stream": True}}, "invalid_value", "stream"),
        ({**LINE, "body": {**CHAT_BODY, "n": 17}}, "invalid_value", "n"),
        ({**LINE, "body": {**CHAT_BODY, "top_logprobs": 2}}, "invalid_value", "top_logprobs"),
        ({**LINE, "url": "/v1/messages", "body": {**CHAT_BODY, "n": 1}}, "unknown_field", "n"),
        (
            {**LINE, "url": "/v1/responses", "body": {**RESPONSE_BODY, "background": True}},
            "invalid_value",
            "background",
        ),
    ],
)
def test_a_bad_record_names_its_fault(value: Any, code: str, param: str | None) -> None:
    found = read(value)
    assert isinstance(found, BadRecord)
    assert (found.error.code, found.error.param) == (code, param)
    encode_error(found.source, None, found.error)


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda tail: b"\xc3\x01" + tail))
def test_no_bytes_break_it(value: bytes) -> None:
    found = read(value)
    assert isinstance(found, BadRecord)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GENERATE, *LINE, "stream", "priority", "messages"]), _json))
def test_no_json_breaks_it(fields: dict[str, Any]) -> None:
    found = read(fields)
    if isinstance(found, BadRecord):
        encode_error(found.source, None, found.error)


FINISHED = Finished(bytes(16), "simulated", 1, "hello", "stop", 3, 0, 5)


def test_answers_have_the_shape_of_what_was_asked() -> None:
    rid = b"\1" * 16
    finished = replace(FINISHED, request_id=rid)
    generate = json.loads(encode_answer(Source("demo", 1, "a"), rid, answer("/v1/generate", finished)))
    assert generate == {
        "custom_id": "a",
        "id": rid.hex(),
        "model": "simulated",
        "text": "hello",
        "usage": {"input_tokens": 3, "cached_tokens": 0, "output_tokens": 5},
        "stop_reason": "stop",
        "error": None,
    }
    source = Source("demo", 1, "a", Shape.LINE)
    line = json.loads(encode_answer(source, rid, answer("/v1/chat/completions", finished)))
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["response"]["request_id"] == rid.hex()
    assert line["response"]["body"]["object"] == "chat.completion"
    avro = decode(encode_answer(Source("demo", 1, "a", Shape.AVRO), rid, answer("/v1/generate", finished)))
    assert isinstance(avro, BatchResult)
    assert json.loads(avro.body or "")["text"] == "hello"


@pytest.mark.parametrize("status", [400, 504])
def test_errors_have_the_shape_of_what_was_asked(status: int) -> None:
    error = ApiError(status, "why", "because", "field")
    generate = json.loads(encode_error(Source("demo", 1, None), None, error))
    assert generate["error"]["code"] == "why"
    assert (generate["custom_id"], generate["offset"]) == (None, 1)
    line = json.loads(encode_error(Source("demo", 1, "a", Shape.LINE), b"\1" * 16, error))
    if status < 500:
        assert line["response"]["status_code"] == 400
        assert line["error"] is None
    else:
        assert line["response"] is None
        assert line["error"] == {"code": "why", "message": "because"}
    avro = decode(encode_error(Source("demo", 1, "a", Shape.AVRO), None, error))
    assert isinstance(avro, BatchResult)
    assert (avro.error_code, avro.error_message) == ("why", "because")


@pytest.mark.parametrize("status", [400, 499, 504])
def test_an_error_tells_what_is_billed_of_its_request(status: int) -> None:
    error, usage = ApiError(status, "why", "because"), {"input_tokens": 3, "output_tokens": 2}

    def told(shape: Shape) -> Any:
        value = encode_error(Source("demo", 1, "a", shape), bytes(16), error, usage)
        if shape is Shape.AVRO:
            return json.loads(getattr(decode(value), "body", None) or "")
        found = json.loads(value)
        if shape is Shape.GENERATE:
            return found
        return found["error"] or found["response"]["body"]

    assert [told(shape)["usage"] for shape in Shape] == [usage] * 3
