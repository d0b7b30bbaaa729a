"""Batches as they are asked for and told: OpenAI's shape, the own, Anthropic's."""

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai.types import Batch

from schemas.api.batches import BatchBody, batch_object, created_object, job_of, window_ms
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.message_batches import line_of, message_batch, message_job, result_line
from schemas.records import BatchError, BatchJob, BatchPart, BatchState
from schemas.stored_files import new_batch_id, result_file_id

NOW = 1_780_000_000_000
DAY_MS = 86_400_000
BATCH_ID = new_batch_id(NOW)
OPENAI = {"input_file_id": "file-a", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def made(**body: Any) -> BatchJob:
    return job_of(decode_body(json.dumps(body).encode(), BatchBody), BATCH_ID, "demo", NOW)


def state(status: str, **fields: Any) -> BatchState:
    return BatchState(BATCH_ID, "demo", status, NOW + DAY_MS, **fields)


def test_a_new_batch_is_validated_first() -> None:
    job = made(**OPENAI, metadata={"a": "b"})
    assert created_object(job) == {
        "id": BATCH_ID,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "model": None,
        "errors": None,
        "input_file_id": "file-a",
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": NOW // 1000,
        "in_progress_at": None,
        "expires_at": (NOW + DAY_MS) // 1000,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        "metadata": {"a": "b"},
    }


@pytest.mark.parametrize("end", ["completed", "failed", "expired", "cancelled"])
def test_an_ended_batch_says_when_in_the_field_of_its_end(end: str) -> None:
    told = batch_object(made(**OPENAI), state(end, ended_at=NOW + 5_000), None)
    batch = Batch.model_validate(told, strict=True)
    assert batch.status == end
    ends = {name: getattr(batch, f"{name}_at") for name in ("completed", "failed", "expired", "cancelled")}
    assert ends == {name: (NOW + 5_000) // 1000 if name == end else None for name in ends}


def test_items_without_an_answer_count_as_failed_for_openais_clients() -> None:
    known = state(
        "in_progress",
        total=9,
        completed=4,
        failed=1,
        expired=2,
        cancelled=1,
        input_tokens=30,
        output_tokens=5,
    )
    told = batch_object(made(**OPENAI), known, None)
    assert told["request_counts"] == {"total": 9, "completed": 4, "failed": 4}
    assert told["usage"]["total_tokens"] == 35


def test_a_cancel_shows_before_its_coordinator_knows_and_not_behind_the_end() -> None:
    job = made(**OPENAI)
    asked = batch_object(job, state("in_progress"), NOW + 3_000)
    assert (asked["status"], asked["cancelling_at"]) == ("cancelling", (NOW + 3_000) // 1000)
    assert batch_object(job, state("completed", ended_at=NOW), NOW + 3_000)["status"] == "completed"


def test_files_are_named_once_they_have_a_part() -> None:
    told = batch_object(made(**OPENAI), state("in_progress", output=[BatchPart(1, 10)]), None)
    assert told["output_file_id"] == result_file_id(BATCH_ID, "output")
    assert told["error_file_id"] is None


def test_why_a_batch_failed_is_told_with_its_line() -> None:
    errors = [BatchError("duplicate_custom_id", "again", 7, "custom_id")]
    told = Batch.model_validate(batch_object(made(**OPENAI), state("failed", errors=errors), None))
    assert told.errors is not None
    assert told.errors.data is not None
    assert [(e.code, e.line, e.param) for e in told.errors.data] == [("duplicate_custom_id", 7, "custom_id")]


def test_the_own_shape_is_queued_first() -> None:
    job = made(input_file_id="file-a", model="gemma")
    assert created_object(job) == {"batch_id": BATCH_ID, "status": "queued"}
    told = batch_object(job, None, None)
    assert (told["batch_id"], told["status"], told["output_file_id"]) == (BATCH_ID, "queued", None)
    running = batch_object(job, state("in_progress", total=3, completed=1, cancelled=1), None)
    assert running["status"] == "in_progress"
    assert running["counts"] == {"total": 3, "completed": 1, "failed": 0, "expired": 0, "cancelled": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-a"}, "endpoint"),
        ({**OPENAI, "endpoint": "/v1/embeddings"}, "endpoint"),
        ({**OPENAI, "completion_window": "30m"}, "completion_window"),
        ({"input_file_id": "file-a", "endpoint": "/v1/generate"}, "completion_window"),
        ({**OPENAI, "priority": "batch"}, "priority"),
        ({**OPENAI, "metadata": {"a": 1}}, "metadata[...]"),
        (
            {**OPENAI, "output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
    ],
)
def test_what_does_not_fit_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        made(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(("text", "hours"), [(None, 24), ("1h", 1), ("7d", 168), ("168h", 168), ("24h", 24)])
def test_windows(text: str | None, hours: int) -> None:
    assert window_ms(text) == hours * 3_600_000


@pytest.mark.parametrize("text", ["", "0h", "8d", "169h", "24", "h", "1.5h", "24H", "99999999999h"])
def test_windows_that_are_none(text: str) -> None:
    with pytest.raises(ApiError, match="completion_window"):
        window_ms(text)


def test_anthropics_shape() -> None:
    job = message_job(BATCH_ID, "demo", "file-a", 5, NOW)
    new = MessageBatch.model_validate(message_batch(job, None, None, "http://here"))
    assert (new.processing_status, new.request_counts.processing, new.results_url) == ("in_progress", 5, None)
    running = message_batch(job, state("in_progress", total=5, completed=2, expired=1), NOW, "http://here")
    assert running["processing_status"] == "canceling"
    assert running["request_counts"] == {
        "processing": 2,
        "succeeded": 2,
        "errored": 0,
        "canceled": 0,
        "expired": 1,
    }
    known = state("cancelled", total=5, completed=2, cancelled=3, ended_at=NOW + 1)
    ended = MessageBatch.model_validate(message_batch(job, known, NOW, "http://here"))
    assert ended.processing_status == "ended"
    assert ended.request_counts.processing == 0
    assert ended.results_url == f"http://here/v1/messages/batches/{BATCH_ID}/results"


def test_a_request_becomes_a_line() -> None:
    params = {"model": "m", "max_tokens": 3, "messages": []}
    custom_id, line = line_of({"custom_id": "a-1", "params": params}, 0)
    assert custom_id == "a-1"
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"custom_id": "a-1", "method": "POST", "url": "/v1/messages", "body": params}


@pytest.mark.parametrize(
    "item", [{}, {"custom_id": "a"}, {"custom_id": "a b", "params": {}}, {"custom_id": "", "params": {}}, 3]
)
def test_a_request_that_does_not_fit_is_named(item: object) -> None:
    with pytest.raises(ApiError, match=r"requests\.4"):
        line_of(item, 4)


@pytest.mark.parametrize(
    ("response", "error", "kind"),
    [
        (
            {"status_code": 200, "request_id": "r", "body": {"type": "message", "id": "msg_1"}},
            None,
            "succeeded",
        ),
        (None, {"code": "batch_expired", "message": "late"}, "expired"),
        (None, {"code": "batch_cancelled", "message": "no"}, "canceled"),
        (None, {"code": "worker_lost", "message": "gone"}, "errored"),
        (
            {
                "status_code": 400,
                "request_id": "r",
                "body": {"error": {"code": "invalid_value", "message": "x: no"}},
            },
            None,
            "errored",
        ),
    ],
)
def test_results_are_told_from_lines(response: Any, error: Any, kind: str) -> None:
    line = json.dumps({"id": "i", "custom_id": "a", "response": response, "error": error}).encode()
    told = json.loads(result_line(line, b"\0" * 16))
    assert told["custom_id"] == "a"
    assert told["result"]["type"] == kind
    if kind == "errored":
        parsed = MessageBatchIndividualResponse.model_validate(told)
        assert parsed.result.type == "errored"
        expected = "invalid_request_error" if response else "api_error"
        assert parsed.result.error.error.type == expected
    if kind == "succeeded":
        assert told["result"]["message"] == {"type": "message", "id": "msg_1"}


def test_a_job_and_its_state_may_differ_in_age() -> None:
    """The window is the job's, when it expires the coordinator's to say."""
    known = replace(state("in_progress"), expires_at=NOW + 7_000)
    assert batch_object(made(**OPENAI), known, None)["expires_at"] == (NOW + 7_000) // 1000
