"""What a client is told when its request did not end normally: the same by its owner and from the log."""

from schemas.api.errors import ApiError
from schemas.records import Completion, Failed, Rejected
from schemas.stream_state import DEADLINE_EXCEEDED

DISCONNECTED = "disconnected"
REQUEST_TOO_LARGE = "request_too_large"
# Only who asked for the end sees it: with 409 or 5xx the official clients would ask for the work again.
_CANCELLED = 410
_STATUS_OF_FAILURE = {
    "no_answer": 503,
    "engine_error": 500,
    "cancelled": _CANCELLED,
    DEADLINE_EXCEEDED: 504,
    REQUEST_TOO_LARGE: 413,
}
_CANCELLED_IN_THE_QUEUE = 499


def error_of(end: Rejected | Failed) -> ApiError:
    """The refusal or failure as an HTTP error."""
    if isinstance(end, Rejected):
        in_queue = end.status == _CANCELLED_IN_THE_QUEUE
        status = _STATUS_OF_FAILURE.get(end.code, _CANCELLED) if in_queue else end.status
        return ApiError(status, end.code, end.message, None, end.retry_after_ms)
    return ApiError(_STATUS_OF_FAILURE.get(end.code, 502), end.code, end.message)


def code_of(end: Completion | Rejected | Failed | ApiError | None) -> str:
    """What logs call it; None is a client that left before."""
    if end is None:
        return DISCONNECTED
    return end.finish_reason if isinstance(end, Completion) else end.code
