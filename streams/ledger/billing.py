"""From a Usage record to the row that is billed. Pure.

One request may have several rows: of retries, of a worker and of its owner, of a record read twice. The
row of highest version counts, in whatever order they arrive (architecture §8).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from schemas.priority import PriorityClass
from schemas.records import Usage
from schemas.topics import check_tenant
from schemas.usage_rank import usage_rank

# version: attempt | sealed | output_tokens | tie-break, from the highest bit down. In place of its output
# tokens a free row has a number above all others.
ATTEMPT_BITS = 12
OUTPUT_BITS = 28
TIE_BITS = 64 - ATTEMPT_BITS - 1 - OUTPUT_BITS
_FREE = (1 << OUTPUT_BITS) - 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = 7_258_118_399_999  # the end of 2199: more does not fit a DateTime64
_UINT32, _UINT64 = 2**32, 2**64


class BillingError(ValueError):
    """A Usage record that cannot be billed; the message names the field."""


class UsageRow(NamedTuple):
    """One row of headrace.usage, columns in the table's order."""

    request_id: str
    tenant: str
    version: int
    attempt: int
    sealed: bool
    priority: str
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    accepted_at: datetime
    ended_at: datetime
    slot: int | None
    epoch: int | None
    first_token_ms: int | None
    recomputed_tokens: int


COLUMNS = tuple("class" if name == "priority" else name for name in UsageRow._fields)


# All fields as a tuple: dataclasses.astuple takes 50 times as long, which copies what it finds.
_WHOLE = attrgetter(*(field.name for field in dataclasses.fields(Usage)))


def version(usage: Usage) -> int:
    """The 64-bit form of `usage_rank`: attempt 12 bits, sealed 1, output tokens 28, tie-break 23.

    The tie-break is a hash of the whole record: rows that differ in nothing else rank the same way in
    every order of arrival, and equal rows are equal.
    """
    digest = hashlib.blake2b(repr(_WHOLE(usage)).encode(), digest_size=8).digest()
    tie = int.from_bytes(digest, "big") >> (64 - TIE_BITS)
    attempt, sealed, free, output_tokens = usage_rank(usage)
    rank = attempt << 1 | sealed
    return (rank << OUTPUT_BITS | (_FREE if free else output_tokens)) << TIE_BITS | tie


def row_of(usage: Usage) -> UsageRow:
    """Raises BillingError when a field cannot be billed."""
    try:
        check_tenant(usage.tenant)
    except ValueError as e:
        raise BillingError(str(e)) from None
    try:
        priority = PriorityClass(usage.priority).label
    except ValueError:
        raise BillingError(f"priority is {usage.priority}, no class") from None
    _check("attempt", usage.attempt, 1, 1 << ATTEMPT_BITS)
    _check("output_tokens", usage.output_tokens, 0, _FREE)
    _check("input_tokens", usage.input_tokens, 0, _UINT64)
    _check("cached_tokens", usage.cached_tokens, 0, usage.input_tokens + 1)
    _check("accepted_at", usage.accepted_at, 1, _LAST_MS)
    _check("ended_at", usage.ended_at, 0, _LAST_MS)
    if usage.slot is not None:
        _check("slot", usage.slot, 0, _UINT32)
    if usage.epoch is not None:
        _check("epoch", usage.epoch, 0, _UINT64)
    if usage.first_token_ms is not None:
        _check("first_token_ms", usage.first_token_ms, 0, _UINT64)
    _check("recomputed_tokens", usage.recomputed_tokens, 0, _UINT64)
    return UsageRow(
        request_id=usage.request_id.hex(),
        tenant=usage.tenant,
        version=version(usage),
        attempt=usage.attempt,
        sealed=usage.sealed,
        priority=priority,
        model=usage.model,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        finish_reason=usage.finish_reason,
        accepted_at=_EPOCH + timedelta(milliseconds=usage.accepted_at),
        ended_at=_EPOCH + timedelta(milliseconds=usage.ended_at),
        slot=usage.slot,
        epoch=usage.epoch,
        first_token_ms=usage.first_token_ms,
        recomputed_tokens=usage.recomputed_tokens,
    )


def billed(rows: Iterable[UsageRow]) -> dict[tuple[str, str], UsageRow]:
    """(tenant, request_id) → the row that counts: what the table's views must show."""
    best: dict[tuple[str, str], UsageRow] = {}
    for row in rows:
        key = (row.tenant, row.request_id)
        known = best.get(key)
        if known is None or row.version > known.version:
            best[key] = row
    return best


def encode_rows(rows: Iterable[Sequence[Any]]) -> bytes:
    """ClickHouse's JSONCompactEachRow, fields in the order of the row."""
    return b"\n".join(
        msgspec.json.encode([_timestamp(field) if isinstance(field, datetime) else field for field in row])
        for row in rows
    )


def _timestamp(when: datetime) -> str:
    return when.replace(tzinfo=None).isoformat(" ", "milliseconds")


def _check(field: str, value: int, low: int, below: int) -> None:
    if not low <= value < below:
        raise BillingError(f"{field} is {value}, not {low} to {below - 1}")
