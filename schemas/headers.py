"""Record headers: enough to refuse to its owner a record whose value cannot be decoded."""

from collections.abc import Iterable
from typing import NamedTuple

Headers = list[tuple[str, bytes]]

_REQUEST_ID = "request_id"
_ATTEMPT = "attempt"
_REPLY_PARTITION = "reply_partition"
TRACEPARENT = "traceparent"
REASON = "reason"


class ReplyTo(NamedTuple):
    """Whose record this is, and where its owner reads."""

    request_id: bytes
    attempt: int
    reply_partition: int


def reply_headers(to: ReplyTo, traceparent: str | None = None) -> Headers:
    headers: Headers = [
        (_REQUEST_ID, to.request_id),
        (_ATTEMPT, str(to.attempt).encode()),
        (_REPLY_PARTITION, str(to.reply_partition).encode()),
    ]
    if traceparent is not None:
        headers.append((TRACEPARENT, traceparent.encode()))
    return headers


def reply_to(headers: Iterable[tuple[str, bytes | None]]) -> ReplyTo | None:
    """The owner named in `headers`; None when a header is missing or no number."""
    found = dict(headers)
    try:
        request_id = found[_REQUEST_ID] or b""
        attempt, reply = int(found[_ATTEMPT] or b""), int(found[_REPLY_PARTITION] or b"")
    except (KeyError, ValueError):
        return None
    return ReplyTo(request_id, attempt, reply) if len(request_id) == 16 else None


def traceparent(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    value = dict(headers).get(TRACEPARENT)
    return value.decode("ascii", "replace") if value else None
