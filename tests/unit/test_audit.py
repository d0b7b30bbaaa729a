"""What the audit reads beside the log. Its findings: tests/e2e/test_audit.py."""

import json

import pytest
from typer.testing import CliRunner

from gateway.public_id import PublicId, PublicIds, hash_model
from infra.audit.batches import judge_time
from infra.audit.checks import Tolerances
from infra.audit.clients import ClientRecordError, read_client_records
from infra.audit.findings import Kind
from infra.audit.fleet import judge_workers, never_rested
from infra.cli import app
from schemas.headers import BATCH
from schemas.records import BatchJob, BatchState, Heartbeat, WorkerStatus
from streams.admission.limits import Limits, OpenReservation
from streams.ledger.batch_item import Shape, Source
from streams.ledger.batch_records import asked_request, request_id_of

REQUEST_ID = bytes(range(16))
NAME = REQUEST_ID.hex()


def stream_id() -> str:
    return PublicIds("secret").encode(
        "acme", PublicId(5, 10**12, REQUEST_ID, 1, hash_model("simulated"), may_be_cut=True)
    )


@pytest.mark.parametrize("request_id", [NAME, f"chatcmpl-{NAME}", f"resp_{NAME}", stream_id()])
def test_a_client_may_name_its_answer_by_any_id_in_it(request_id: str) -> None:
    line = json.dumps({"request_id": request_id, "status": 200, "tokens": [7, 8], "end": "stop"}).encode()
    (record,) = read_client_records([line, b"\n"])[REQUEST_ID]
    assert (record.num_tokens, record.token_ids, record.end) == (2, [7, 8], "stop")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"no", "JSON"),
        (b'{"request_id": "x", "status": 200}', "request_id"),
        (b'{"request_id": "%b"}' % NAME.encode(), "status"),
        (b'{"request_id": "%b", "status": 200, "tokens": "many"}' % NAME.encode(), "tokens"),
        (b'{"request_id": "%b", "status": 200, "token": 3}' % NAME.encode(), "token"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: bytes, named: str) -> None:
    with pytest.raises(ClientRecordError, match=f"line 2: .*{named}"):
        read_client_records([b"", line])


def test_reservations_are_told_while_they_are_open() -> None:
    limits = Limits()
    for n in (1, 2, 3):
        limits.reserve(bytes([n]) * 16, 1, "acme", 0, 10, n, end_at=1_000 * n, now=0)
    limits.settle(b"\1" * 16, "acme", 0, 10, 1, 0, 0)
    told = limits.open_reservations()
    assert next(told) == OpenReservation(b"\2" * 16, "acme", 0, 12, 2_000)
    limits.expire(3_000)
    assert list(told) == []


def test_a_batch_record_is_known_by_the_id_that_its_coordinator_gives_it() -> None:
    asked = {"custom_id": "one", "model": "simulated", "prompt": "hi"}
    body = {"model": "simulated", "prompt": "hi"}
    source = Source("acme", 7, "one", Shape.GENERATE, "evening")
    headers = [(BATCH, b"evening")]
    assert asked_request(json.dumps(asked).encode(), "acme", headers) == request_id_of(
        source, "/v1/generate", body
    )
    assert asked_request(b"{}", "acme") is None
    assert asked_request(json.dumps(asked).encode(), "acme", [(BATCH, b"x" * 1_000)]) is None


@pytest.mark.parametrize(
    ("status", "late_ms", "found"),
    [
        (None, 91_000, [("none", 91_000)]),
        ("in_progress", 91_000, [("in_progress", 91_000)]),
        ("expired", 91_000, []),
        ("in_progress", 89_000, []),
    ],
)
def test_a_batch_past_its_time_is_named(
    status: str | None, late_ms: int, found: list[tuple[str, int]]
) -> None:
    job = BatchJob("batch_1", "acme", "openai", "file-1", None, None, 10_000, created_at=1_000)
    state = None if status is None else BatchState("batch_1", "acme", status, 11_000)
    findings = list(judge_time(job, state, 11_000 + late_ms, Tolerances()))
    assert [(each.figures["status"], each.figures["late_ms"]) for each in findings] == found
    assert {each.kind for each in findings} <= {Kind.PAST_DEADLINE}


def test_the_time_looked_at_ends_where_tokens_age_out() -> None:
    answer = CliRunner().invoke(app, ["audit", "--kafka", "127.0.0.1:1", "--sql", "x", "--last", "3h"])
    assert answer.exit_code == 1
    assert "inference.tokens is kept for 2 h" in answer.output


def beat(slot: int, epoch: int, running: int, free: int) -> Heartbeat:
    status = WorkerStatus(
        "m", 100, False, 100, free, 16, 4, running, [0, 0, 0], 0, [0, 0, 0], 0, 1.0, 2.0, 3.0
    )
    return Heartbeat("worker", slot, epoch, b"", worker=status)


def test_a_worker_that_rested_once_is_judged_and_one_that_never_did_is_told() -> None:
    beats = [beat(0, 1, 2, 80), beat(0, 1, 0, 100), beat(1, 1, 0, 100), beat(1, 2, 1, 90), beat(2, 1, 0, 99)]
    assert never_rested(beats) == [1]
    assert [(f.kind, f.figures["slot"]) for f in judge_workers(beats, idle=False)] == [(Kind.LEAKED_BLOCK, 2)]
    idle = [(f.kind, f.figures["slot"]) for f in judge_workers(beats, idle=True)]
    assert idle == [(Kind.GHOST_SEQUENCE, 1), (Kind.LEAKED_BLOCK, 2)]
