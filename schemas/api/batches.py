"""/v1/batches: what is asked and what is told, in OpenAI's shape and in the own. Pure.

A body with `endpoint` is OpenAI's. One without is the own: {"input_file_id", "model"}, whose lines may be
batch-file lines or bodies of /v1/generate, and whose answers have batch_id, status and counts.
"""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.errors import ApiError, bad_field
from schemas.api.messages import MessagesBody
from schemas.api.prepare import BODIES, MESSAGES_URL, Body
from schemas.api.responses import RESPONSES_URL, ResponsesBody
from schemas.records import BatchJob, BatchState
from schemas.stored_files import result_file_id
from schemas.topics import DAY_MS, HOUR_MS

BATCHES_URL = "/v1/batches"
# Urls that a line may have, and what its body is.
LineBody = Body | MessagesBody | ResponsesBody
LINE_BODIES: dict[str, type[LineBody]] = {
    **BODIES,
    MESSAGES_URL: MessagesBody,
    RESPONSES_URL: ResponsesBody,
}
# Of a file with a batch's lines.
PURPOSE = "batch"
OPENAI, HEADRACE, ANTHROPIC = "openai", "headrace", "anthropic"
# Of lines that were not run to their end.
EXPIRED_CODE, CANCELLED_CODE = "batch_expired", "batch_cancelled"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
DEFAULT_WINDOW_MS = DAY_MS
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_UNITS = {"h": HOUR_MS, "d": DAY_MS}
_MIN_WINDOW_MS, _MAX_WINDOW_MS = HOUR_MS, 7 * DAY_MS


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """`seconds` after the file was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3_600, le=2_592_000)]


class BatchBody(Struct, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: fields.Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    model: str | None = None


def job_of(body: BatchBody, batch_id: str, tenant: str, now_ms: int) -> BatchJob:
    """Raises ApiError that names the field."""
    if body.endpoint is None and body.model is None:
        raise ApiError(400, "missing_field", "endpoint: this field is required, or model", "endpoint")
    if body.endpoint is not None and body.endpoint not in LINE_BODIES:
        raise bad_field("endpoint", f"use one of {', '.join(LINE_BODIES)}")
    if body.endpoint is not None and body.completion_window is None:
        raise ApiError(400, "missing_field", "completion_window: this field is required", "completion_window")
    expires = body.output_expires_after
    return BatchJob(
        batch_id=batch_id,
        tenant=tenant,
        form=HEADRACE if body.endpoint is None else OPENAI,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        model=body.model,
        completion_window_ms=window_ms(body.completion_window),
        created_at=now_ms,
        metadata=body.metadata or {},
        output_expires_ms=None if expires is None else expires.seconds * 1000,
    )


def window_ms(text: str | None) -> int:
    """Raises ApiError 400. None is 24 hours."""
    if text is None:
        return DEFAULT_WINDOW_MS
    found = _WINDOW.fullmatch(text)
    window = 0 if found is None else int(found[1]) * _UNITS[found[2]]
    if not _MIN_WINDOW_MS <= window <= _MAX_WINDOW_MS:
        raise bad_field("completion_window", f"hours or days from 1h to 7d, as 24h, not {text[:20]!r}")
    return window


def window_text(window: int) -> str:
    return f"{window // HOUR_MS}h"


def status_of(state: BatchState | None, cancel_asked: bool) -> str:
    """What is so, or is being made so."""
    status = "validating" if state is None else state.status
    return "cancelling" if cancel_asked and status not in ENDED else status


def result_ids(state: BatchState | None) -> tuple[str | None, str | None]:
    """Ids of the output and of the error file, where there is one by now."""
    if state is None:
        return None, None
    return (
        result_file_id(state.batch_id, "output") if state.output else None,
        result_file_id(state.batch_id, "error") if state.error_output else None,
    )


def batch_object(job: BatchJob, state: BatchState | None, cancel_asked_at: int | None) -> dict[str, Any]:
    """In the shape it was asked in."""
    if job.form == HEADRACE:
        return _own(job, state, cancel_asked_at)
    known = state or BatchState(
        job.batch_id, job.tenant, "validating", job.created_at + job.completion_window_ms
    )
    status = status_of(state, cancel_asked_at is not None)
    output_id, error_id = result_ids(state)
    return {
        "id": job.batch_id,
        "object": "batch",
        "endpoint": job.endpoint or "",
        "model": job.model,
        "errors": _errors(known) if known.errors else None,
        "input_file_id": job.input_file_id,
        "completion_window": window_text(job.completion_window_ms),
        "status": status,
        "output_file_id": output_id,
        "error_file_id": error_id,
        "created_at": job.created_at // 1000,
        "in_progress_at": _seconds(known.in_progress_at),
        "expires_at": known.expires_at // 1000,
        "finalizing_at": _seconds(known.finalizing_at),
        **{f"{end}_at": _seconds(known.ended_at) if status == end else None for end in sorted(ENDED)},
        "cancelling_at": _seconds(known.cancelling_at or cancel_asked_at),
        "request_counts": {
            "total": known.total,
            "completed": known.completed,
            "failed": known.failed + known.expired + known.cancelled,
        },
        "usage": {
            "input_tokens": known.input_tokens,
            "input_tokens_details": {"cached_tokens": known.cached_tokens},
            "output_tokens": known.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": known.input_tokens + known.output_tokens,
        },
        "metadata": job.metadata or None,
    }


def created_object(job: BatchJob) -> dict[str, Any]:
    """The answer to who made it."""
    if job.form == HEADRACE:
        return {"batch_id": job.batch_id, "status": "queued"}
    return batch_object(job, None, None)


def _own(job: BatchJob, state: BatchState | None, cancel_asked_at: int | None) -> dict[str, Any]:
    output_id, error_id = result_ids(state)
    status = (
        "queued"
        if state is None and cancel_asked_at is None
        else status_of(state, cancel_asked_at is not None)
    )
    known = state or BatchState(job.batch_id, job.tenant, status, job.created_at + job.completion_window_ms)
    return {
        "batch_id": job.batch_id,
        "object": "batch",
        "status": status,
        "model": job.model,
        "input_file_id": job.input_file_id,
        "output_file_id": output_id,
        "error_file_id": error_id,
        "counts": {
            "total": known.total,
            "completed": known.completed,
            "failed": known.failed,
            "expired": known.expired,
            "cancelled": known.cancelled,
        },
        "usage": {
            "input_tokens": known.input_tokens,
            "cached_tokens": known.cached_tokens,
            "output_tokens": known.output_tokens,
        },
        "created_at": job.created_at // 1000,
        "in_progress_at": _seconds(known.in_progress_at),
        "finalizing_at": _seconds(known.finalizing_at),
        "cancelling_at": _seconds(known.cancelling_at or cancel_asked_at),
        "ended_at": _seconds(known.ended_at),
        "expires_at": known.expires_at // 1000,
        "errors": _errors(known)["data"],
        "metadata": job.metadata,
    }


def _errors(state: BatchState) -> dict[str, Any]:
    data = [{"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in state.errors]
    return {"object": "list", "data": data}


def _seconds(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000
