"""Billing rows: one per request, whatever arrives in whatever order."""

import dataclasses
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Usage
from schemas.usage_rank import usage_rank
from streams.ledger.billing import (
    ATTEMPT_BITS,
    COLUMNS,
    OUTPUT_BITS,
    TIE_BITS,
    BillingError,
    billed,
    encode_rows,
    row_of,
    version,
)


def make_usage(**changes: object) -> Usage:
    base = Usage(
        request_id=bytes(16),
        attempt=1,
        sealed=False,
        tenant="demo",
        priority=0,
        model="m",
        input_tokens=10,
        cached_tokens=0,
        output_tokens=5,
        finish_reason="stop",
        accepted_at=1_764_446_000_123,
        ended_at=1_764_446_001_456,
        slot=0,
        epoch=7,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


usages = st.builds(
    make_usage,
    request_id=st.sampled_from([bytes(16), b"\1" * 16]),
    attempt=st.integers(1, 4),
    sealed=st.booleans(),
    tenant=st.sampled_from(["a", "b"]),
    input_tokens=st.sampled_from([0, 3]),
    output_tokens=st.integers(0, 3),
    cached_tokens=st.integers(0, 3),
    ended_at=st.integers(0, 3),
).map(lambda usage: dataclasses.replace(usage, cached_tokens=min(usage.cached_tokens, usage.input_tokens)))


def test_bits_fill_a_uint64() -> None:
    assert ATTEMPT_BITS + 1 + OUTPUT_BITS + TIE_BITS == 64
    assert version(make_usage(attempt=(1 << ATTEMPT_BITS) - 1, sealed=True)) < 1 << 64


@given(st.lists(usages, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_and_doubling_leaves_the_same_rows(records: list[Usage], rng: random.Random) -> None:
    once = billed(map(row_of, records))
    shuffled = records + rng.choices(records, k=3)
    rng.shuffle(shuffled)
    assert billed(map(row_of, shuffled)) == once
    for (tenant, request_id), row in once.items():
        own = [u for u in records if (u.tenant, u.request_id.hex()) == (tenant, request_id)]
        best = max(map(usage_rank, own))
        free = row.sealed and row.input_tokens == row.output_tokens == 0
        assert (row.attempt, row.sealed, free, row.output_tokens) == best


@given(usages, usages)
def test_version_orders_as_the_rank(a: Usage, b: Usage) -> None:
    key_a, key_b = usage_rank(a), usage_rank(b)
    if key_a != key_b:
        assert (version(a) < version(b)) == (key_a < key_b)
    else:
        assert (version(a) == version(b)) == (a == b)


def test_what_is_waived_is_free_whatever_was_billed_of_that_attempt() -> None:
    most = make_usage(sealed=True, output_tokens=(1 << OUTPUT_BITS) - 2)
    waived = make_usage(sealed=True, input_tokens=0, output_tokens=0)
    for rows in ([most, waived], [waived, most]):
        (row,) = billed(map(row_of, rows)).values()
        assert (row.input_tokens, row.output_tokens) == (0, 0)
    # A worker's empty row is no such word, and a later attempt counts above it.
    empty = make_usage(input_tokens=0, output_tokens=0)
    assert version(empty) < version(make_usage(output_tokens=1))
    assert version(waived) < version(make_usage(attempt=2, output_tokens=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "No Such"),
        ("priority", 3),
        ("attempt", 0),
        ("attempt", 1 << ATTEMPT_BITS),
        ("output_tokens", -1),
        ("output_tokens", (1 << OUTPUT_BITS) - 1),
        ("input_tokens", -1),
        ("cached_tokens", 11),
        ("accepted_at", 0),
        ("ended_at", 1 << 60),
        ("slot", -1),
        ("epoch", -1),
    ],
)
def test_what_cannot_be_billed_names_the_field(field: str, value: object) -> None:
    with pytest.raises(BillingError, match=field):
        row_of(make_usage(**{field: value}))


def test_rows_are_encoded_in_the_order_of_the_columns() -> None:
    rows = [row_of(make_usage()), row_of(make_usage(tenant="other", slot=None))]
    lines = [dict(zip(COLUMNS, json.loads(line), strict=True)) for line in encode_rows(rows).splitlines()]
    assert [line["tenant"] for line in lines] == ["demo", "other"]
    assert [line["slot"] for line in lines] == [0, None]
    assert lines[0]["class"] == "interactive"
    assert lines[0]["accepted_at"] == "2025-11-29 19:53:20.123"
    assert lines[0]["version"] == rows[0].version
