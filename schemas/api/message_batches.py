"""/v1/messages/batches, as Anthropic's API has it. Pure.

A batch of messages is a batch of a file's lines like any other: its requests become lines for
/v1/messages, and its results are told from the lines of its output and error files.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from schemas.api.batches import ANTHROPIC, CANCELLED_CODE, DEFAULT_WINDOW_MS, ENDED, EXPIRED_CODE
from schemas.api.errors import TYPES, ApiError, bad_field
from schemas.api.prepare import MESSAGES_URL
from schemas.records import BatchJob, BatchState

MESSAGE_BATCHES_URL = f"{MESSAGES_URL}/batches"
MAX_REQUESTS = 100_000


class BatchedMessage(Struct, forbid_unknown_fields=True):
    """One of `requests`. `params`: a body of /v1/messages."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]*$")]
    params: dict[str, Any]


class MessageBatchBody(Struct, forbid_unknown_fields=True):
    """POST /v1/messages/batches. Read piece by piece, never whole."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]


class _Response(Struct):
    status_code: int
    body: Raw


class _Error(Struct):
    code: str
    message: str


class _Line(Struct):
    custom_id: str
    response: _Response | None
    error: _Error | None = None


class _Refused(Struct):
    error: _Error


def line_of(item: object, index: int) -> tuple[str, bytes]:
    """(custom_id, batch-file line) of a decoded element of `requests`. Raises ApiError that names it."""
    try:
        message = msgspec.convert(item, BatchedMessage)
    except msgspec.ValidationError as e:
        raise bad_field(f"requests.{index}", str(e)) from None
    line = {
        "custom_id": message.custom_id,
        "method": "POST",
        "url": MESSAGES_URL,
        "body": message.params,
    }
    return message.custom_id, msgspec.json.encode(line) + b"\n"


def message_job(batch_id: str, tenant: str, input_file_id: str, lines: int, now_ms: int) -> BatchJob:
    return BatchJob(
        batch_id=batch_id,
        tenant=tenant,
        form=ANTHROPIC,
        input_file_id=input_file_id,
        endpoint=MESSAGES_URL,
        model=None,
        completion_window_ms=DEFAULT_WINDOW_MS,
        created_at=now_ms,
        lines=lines,
    )


def message_batch(
    job: BatchJob, state: BatchState | None, cancel_asked_at: int | None, base_url: str
) -> dict[str, Any]:
    """`base_url`: of this API, with which the url of the results is made."""
    ended = state is not None and state.status in ENDED
    known = state or BatchState(job.batch_id, job.tenant, "validating", job.created_at + DEFAULT_WINDOW_MS)
    cancelling_at = known.cancelling_at or cancel_asked_at
    total = known.total or job.lines or 0
    done = known.completed + known.failed + known.cancelled + known.expired
    status = "ended" if ended else "in_progress" if cancelling_at is None else "canceling"
    url = f"{base_url}{MESSAGE_BATCHES_URL}/{job.batch_id}/results"
    return {
        "id": job.batch_id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if ended else max(0, total - done),
            "succeeded": known.completed,
            "errored": known.failed,
            "canceled": known.cancelled,
            "expired": known.expired,
        },
        "created_at": _rfc3339(job.created_at),
        "expires_at": _rfc3339(known.expires_at),
        "ended_at": _rfc3339(known.ended_at),
        "cancel_initiated_at": _rfc3339(cancelling_at),
        "archived_at": None,
        "results_url": url if ended else None,
    }


def result_line(line: bytes, request_id: bytes) -> bytes:
    """A line of the results, from one of the output or error file."""
    known = msgspec.json.decode(line, type=_Line)
    result: dict[str, Any]
    if known.response is not None and known.response.status_code == 200:
        result = {"type": "succeeded", "message": known.response.body}
    elif known.response is not None:
        refused = msgspec.json.decode(known.response.body, type=_Refused).error
        result = _errored(known.response.status_code, refused, request_id)
    elif known.error is not None and known.error.code == EXPIRED_CODE:
        result = {"type": "expired"}
    elif known.error is not None and known.error.code == CANCELLED_CODE:
        result = {"type": "canceled"}
    else:
        result = _errored(500, known.error or _Error("internal_error", "unknown"), request_id)
    return msgspec.json.encode({"custom_id": known.custom_id, "result": result}) + b"\n"


def _errored(status: int, error: _Error, request_id: bytes) -> dict[str, Any]:
    api_error = ApiError(status if status in TYPES else 500, error.code, error.message)
    return {"type": "errored", "error": api_error.to_anthropic(request_id)}


def _rfc3339(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
