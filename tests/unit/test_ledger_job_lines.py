"""Lines of a job's file: cut the same however they are read, and checked as a whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import BatchJob, Tenant
from streams.ledger import job_lines
from streams.ledger.batch_item import BatchItem
from streams.ledger.file_lines import item_request_id
from streams.ledger.job_lines import MAX_ERRORS, BadLine, Line, LineCheck, LineCutter, read_line
from tests.batch_world import MODELS

CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}


def make_job(endpoint: str | None = "/v1/chat/completions", model: str | None = None) -> BatchJob:
    return BatchJob("batch_" + "2" * 32, "demo", "openai", "file-x", endpoint, model, 60_000, 1_000)


def make_line(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": CHAT, **fields}


def checked(data: bytes, endpoint: str | None = "/v1/chat/completions") -> LineCheck:
    cutter, check = LineCutter(), LineCheck(make_job(endpoint))
    if check.take(cutter.push(data)) and check.take(cutter.end()):
        check.end()
    return check


def read(
    line: dict[str, Any], job: BatchJob | None = None, rules: Tenant | None = None
) -> BatchItem | BadLine:
    data = json.dumps(line).encode()
    return read_line(job or make_job(), 3, Line(1, 0, len(data), data), MODELS, rules)


@given(
    st.lists(st.sampled_from([b"{}", b"  ", b"", b'{"a": "\xc3\xa9"}', b"xyz\r"]), max_size=8),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_lines_are_the_same_however_they_come(texts: list[bytes], ends: bool, sizes: list[int]) -> None:
    data = b"\n".join(texts) + (b"\n" if ends and texts else b"")
    cutter, found, at, step = LineCutter(), [], 0, 0
    while at < len(data):
        size = sizes[step % len(sizes)]
        found += cutter.push(data[at : at + size])
        at, step = at + size, step + 1
    found += cutter.end()
    assert [line.data for line in found] == [text for text in texts if text.strip()]
    for line in found:
        assert line.data is not None
        assert data[line.offset : line.end].rstrip(b"\n") == line.data
        assert texts[line.number - 1] == line.data
        # Whoever begins where a line begins reads the same from there on.
        rest = LineCutter(line.offset)
        assert next(iter(rest.push(data[line.offset :]) + rest.end())).data == line.data


def test_a_line_that_is_too_long_is_skipped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lines, "MAX_LINE_BYTES", 100)
    good = b'{"custom_id":"b","url":"/v1/generate","body":{}}'
    data = b"y" * 250 + b"\n" + good + b"\n" + b"z" * 101
    cutter = LineCutter()
    found = [
        line for at in range(0, len(data), 40) for line in cutter.push(data[at : at + 40])
    ] + cutter.end()
    assert [(line.number, line.data) for line in found] == [(1, None), (2, good), (3, None)]
    assert [(line.offset, line.end) for line in found] == [(0, 251), (251, 300), (300, 401)]
    check = checked(data, None)
    assert [(error.code, error.line) for error in check.errors] == [
        ("line_too_long", 1),
        ("line_too_long", 3),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    check = checked(b"\xef\xbb\xbf" + json.dumps(make_line()).encode())
    assert (check.total, check.errors) == (1, [])


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"[1]", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (make_line(None), "missing_field", "custom_id"),
        (make_line(5), "invalid_value", "custom_id"),
        (make_line("x" * 513), "invalid_value", "custom_id"),
        (make_line(method="GET"), "invalid_value", "method"),
        (make_line(url="/v1/completions"), "invalid_value", "url"),
        (make_line(url="/v1/embeddings"), "invalid_value", "url"),
        (make_line(url=["x"]), "invalid_value", "url"),
        ({"custom_id": "a", "body": CHAT}, "missing_field", "url"),
        ({"custom_id": "a", **CHAT}, "missing_field", "url"),
    ],
)
def test_what_is_wrong_with_a_file_has_its_line(line: Any, code: str, param: str | None) -> None:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    check = checked(json.dumps(make_line("first")).encode() + b"\n\n" + data)
    assert [(e.code, e.line, e.param) for e in check.errors] == [(code, 3, param)]


def test_what_is_wrong_with_a_body_is_its_lines_own() -> None:
    for line in (make_line(body="text"), make_line(extra=1), make_line(body={**CHAT, "stream": True})):
        assert not checked(json.dumps(line).encode()).errors
        bad = read(line)
        assert isinstance(bad, BadLine)
        assert bad.error.status == 400
    without = make_line()
    del without["body"]
    bad = read(without)
    assert isinstance(bad, BadLine)
    assert bad.error.param == "body"


def test_names_that_stand_twice_and_files_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps(make_line(f"n{i % 4}")).encode() for i in range(6)]
    check = checked(b"\n".join(lines))
    assert [(e.code, e.line) for e in check.errors] == [
        ("duplicate_custom_id", 5),
        ("duplicate_custom_id", 6),
    ]
    monkeypatch.setattr(job_lines, "MAX_FILE_LINES", 5)
    assert [(e.code, e.line) for e in checked(b"\n".join(lines)).errors][-1] == ("too_many_lines", 6)
    assert [e.code for e in checked(b"\n \n").errors] == ["empty_file"]


def test_only_so_many_errors_are_told() -> None:
    check = checked(b"x\n" * 1_000)
    assert [error.line for error in check.errors] == list(range(1, MAX_ERRORS + 1))


def test_an_item_is_the_same_in_every_life() -> None:
    job = make_job()
    one, two = read(make_line(), job), read(make_line(), job)
    assert isinstance(one, BatchItem)
    assert isinstance(two, BatchItem)
    assert one.request_id == two.request_id == item_request_id(job.batch_id, 3)
    assert one.sampling.seed == two.sampling.seed
    assert (one.accepted_at, one.end_ms) == (1_000, 60_000)


def test_the_own_form_takes_bodies_and_lines_and_has_a_model_for_both() -> None:
    job = make_job(None, "simulated")
    bare = read({"custom_id": "a", "prompt": "hi"}, job)
    assert isinstance(bare, BatchItem)
    assert bare.url == "/v1/generate"
    line = read(make_line(url="/v1/completions", body={"prompt": "hi"}), job)
    assert isinstance(line, BatchItem)
    assert line.url == "/v1/completions"
    named = read({"custom_id": "a", "prompt": "hi", "model": "other"}, job)
    assert isinstance(named, BadLine)
    assert named.error.code == "model_not_found"


def test_lines_are_held_to_what_the_tenant_may() -> None:
    bad = read(make_line(), rules=Tenant("demo", 2, [], [], allowed_models=["other"]))
    assert isinstance(bad, BadLine)
    assert bad.error.code == "model_not_allowed"
