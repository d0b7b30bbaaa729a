"""Record headers: enough to refuse to its owner a record whose value cannot be decoded."""

from collections.abc import Iterable
from typing import NamedTuple

Headers = list[tuple[str, bytes]]

_REQUEST_ID = "request_id"
_ATTEMPT = "attempt"
_REPLY_PARTITION = "reply_partition"
TRACEPARENT = "traceparent"
# Of a record of batch.requests: which of the tenant's batches it belongs to. Its answer has it too.
BATCH = "batch"


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


def answer_headers(request_id: bytes | None, batch: str | None) -> Headers:
    """Of a record of batch.results: `request_id` in hex, and the batch as it was named."""
    headers: Headers = []
    if request_id is not None:
        headers.append((_REQUEST_ID, request_id.hex().encode()))
    if batch is not None:
        headers.append((BATCH, batch.encode()))
    return headers


def answered_request(headers: Iterable[tuple[str, bytes | None]]) -> bytes | None:
    """Whose answer `answer_headers` were written for; None where they do not say."""
    try:
        request_id = bytes.fromhex((dict(headers).get(_REQUEST_ID) or b"").decode("ascii"))
    except ValueError:
        return None
    return request_id if len(request_id) == 16 else None


def traceparent(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    value = dict(headers).get(TRACEPARENT)
    return value.decode("ascii", "replace") if value else None
