"""Costs, invoices and what is not billed, on the embedded engine, against plain sums over the same rows."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from infra.invoice import invoice_query, make_invoice, parse_month
from schemas.prices import price_key
from schemas.priority import PriorityClass
from schemas.records import Price, Usage
from streams.ledger.billing import UsageRow, billed, row_of
from streams.ledger.clickhouse import BillingStore, QueryLimits, ReadOnlyEngine
from streams.ledger.prices import price_row

DDL = Path(__file__).parents[2] / "infra" / "clickhouse"
DAY_MS = 86_400_000
NOVEMBER = int(datetime(2026, 11, 1, tzinfo=UTC).timestamp() * 1000)
NOON_OF_14TH = NOVEMBER + 13 * DAY_MS + DAY_MS // 2
PRICES = [
    Price("m", 0, NOVEMBER - 40 * DAY_MS, "USD", "1.25", "0.3", "5.5"),
    Price("m", 2, NOVEMBER - 40 * DAY_MS, "USD", "0.625", "0.3", "2.75"),
    # In the middle of a day, and at the first moment of one.
    Price("m", 0, NOON_OF_14TH, "USD", "1.1", "0.2", "0.000001"),
    Price("m", 2, NOVEMBER + 20 * DAY_MS, "EUR", "0.5", "0.1", "999999999.999999"),
    Price("other", 0, NOVEMBER + 5 * DAY_MS + 1, "USD", "7", "7", "7"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chdb") / "data"


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[BillingStore]:
    store = BillingStore(f"chdb://{folder}")
    store.migrate(DDL)
    put(store, PRICES)
    yield store
    store.close()


@pytest.fixture(scope="module")
def engine(store: BillingStore, folder: Path) -> ReadOnlyEngine:
    return ReadOnlyEngine(folder)


def put(store: BillingStore, prices: list[Price], offset: int = 0) -> None:
    rows = [price_row(price_key(p.model, p.priority, p.valid_from), p, offset) for p in prices]
    store.insert_prices(rows)


def ask(engine: ReadOnlyEngine, sql: str) -> list[dict[str, str]]:
    """Rows, every value as text."""
    body = engine.query(sql, "JSONStringsEachRow", {}, QueryLimits()).body
    return [msgspec.json.decode(line) for line in body.splitlines()]


def make_usage(rng: random.Random, tenant: str, **changes: object) -> Usage:
    input_tokens = rng.randrange(1, 5000)
    edges = [
        NOVEMBER,
        NOON_OF_14TH,
        NOVEMBER + 20 * DAY_MS,
        NOVEMBER + 5 * DAY_MS + 1,
        NOVEMBER + 30 * DAY_MS,
    ]
    near = rng.choice(edges) + rng.randint(-1, 1)
    accepted_at = rng.choice([near, rng.randrange(NOVEMBER - 5 * DAY_MS, NOVEMBER + 32 * DAY_MS)])
    usage = Usage(
        rng.randbytes(16), 1, False, tenant, rng.randrange(3), rng.choice(["m", "m", "other"]), input_tokens,
        rng.randrange(input_tokens + 1), rng.randrange(500), "stop", accepted_at, accepted_at + 900, 0, 7,
    )  # fmt: skip
    return replace(usage, **changes)  # type: ignore[arg-type]


def price_of(row: UsageRow) -> Price | None:
    """What the docs promise, one row at a time."""
    at = round(row.accepted_at.timestamp() * 1000)
    own = [
        p
        for p in PRICES
        if (p.model, PriorityClass(p.priority).label) == (row.model, row.priority) and p.valid_from <= at
    ]
    return max(own, key=lambda p: p.valid_from, default=None)


def test_an_invoice_is_the_sum_of_its_requests_each_at_the_price_of_its_time(
    store: BillingStore, engine: ReadOnlyEngine
) -> None:
    rng = random.Random(5)
    usages = [make_usage(rng, tenant) for tenant in ("demo", "other") for _ in range(400)]
    # Lower versions, higher ones, and records read twice, over several parts.
    usages += [replace(u, attempt=2, output_tokens=u.output_tokens + 3) for u in rng.sample(usages, 80)]
    usages += rng.choices(usages, k=200)
    rng.shuffle(usages)
    rows = [row_of(usage) for usage in usages]
    for begin in range(0, len(rows), 150):
        store.insert(rows[begin : begin + 150])

    exact: dict[str, Decimal] = defaultdict(Decimal)
    unpriced = 0
    for (tenant, _), row in billed(rows).items():
        if tenant != "demo" or (row.accepted_at.year, row.accepted_at.month) != (2026, 11):
            continue
        uncached, price = row.input_tokens - row.cached_tokens, price_of(row)
        if price is None:
            unpriced += row.input_tokens + row.output_tokens
            continue
        prices = (price.input_price, price.cached_input_price, price.output_price)
        for tokens, each in zip((uncached, row.cached_tokens, row.output_tokens), prices, strict=True):
            exact[price.currency] += tokens * Decimal(each) / 1_000_000

    query = invoice_query("demo", parse_month("2026-11"))
    body = engine.query(query, "JSONEachRow", {}, QueryLimits()).body
    invoice = make_invoice("demo", parse_month("2026-11"), map(msgspec.json.decode, body.splitlines()))
    assert invoice.totals == dict(exact)
    assert set(exact) == {"USD", "EUR"}
    assert invoice.unpriced_tokens == unpriced > 0
    assert not invoice.complete
    tops = ask(engine, "SELECT * FROM top_tenants WHERE month = '2026-11-01' AND tenant = 'demo'")
    costs = {top["currency"]: Decimal(top["cost"]) for top in tops if top["cost"] != "ᴺᵁᴸᴸ"}
    assert costs == dict(exact)


def test_discounts_are_what_the_same_tokens_would_have_cost_more(
    store: BillingStore, engine: ReadOnlyEngine
) -> None:
    rng = random.Random(6)
    million = {
        "model": "m",
        "input_tokens": 3_000_000,
        "cached_tokens": 1_000_000,
        "output_tokens": 1_000_000,
    }
    store.insert([row_of(make_usage(rng, "discounts", priority=2, accepted_at=NOVEMBER, **million))])
    (row,) = ask(engine, "SELECT * FROM costs WHERE tenant = 'discounts'")
    assert Decimal(row["cost"]) == 2 * Decimal("0.625") + Decimal("0.3") + Decimal("2.75")
    assert Decimal(row["cached_discount"]) == Decimal("0.325")
    assert Decimal(row["class_discount"]) == 2 * Decimal("0.625") + Decimal("2.75")


def test_a_price_set_again_replaces_and_one_taken_back_leaves_the_one_before(
    store: BillingStore, engine: ReadOnlyEngine
) -> None:
    rng = random.Random(7)
    accepted = {"accepted_at": NOVEMBER, "input_tokens": 1_000_000, "cached_tokens": 0, "output_tokens": 0}
    store.insert([row_of(make_usage(rng, "replaced", model="again", priority=0, **accepted))])
    first = Price("again", 0, NOVEMBER - 2, "USD", "1", "1", "1")
    second = Price("again", 0, NOVEMBER - 1, "USD", "2", "2", "2")

    def cost() -> str:
        return ask(engine, "SELECT cost FROM costs WHERE tenant = 'replaced'")[0]["cost"]

    assert cost() == "ᴺᵁᴸᴸ"
    put(store, [first, second], 10)
    assert cost() == "2"
    put(store, [replace(second, input_price="3")], 11)
    put(store, [second], 10)  # read again
    assert cost() == "3"
    store.insert_prices([price_row(price_key("again", 0, NOVEMBER - 1), None, 12)])
    assert cost() == "1"


def test_what_was_computed_and_not_billed(store: BillingStore, engine: ReadOnlyEngine) -> None:
    rng = random.Random(8)
    served = make_usage(
        rng, "lost", model="m", priority=0, accepted_at=NOVEMBER, input_tokens=100, cached_tokens=40,
        output_tokens=50,
    )  # fmt: skip
    sealed = {
        "sealed": True,
        "input_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "finish_reason": "error",
    }
    waived = replace(served, request_id=rng.randbytes(16))
    retried = replace(served, request_id=rng.randbytes(16), output_tokens=30)
    usages = [
        served,
        # Ended by our fault: what its worker told of costs nothing.
        waived,
        replace(waived, **sealed),  # type: ignore[arg-type]
        # Its first run went on to 30 tokens; the next one began again at 20 and was preempted.
        retried,
        replace(retried, attempt=2, output_tokens=80, recomputed_tokens=120 + 60),
    ]
    for usage in usages * 2:
        store.insert([row_of(usage)])
    (row,) = ask(engine, "SELECT * FROM not_billed WHERE tenant = 'lost'")
    assert row == {
        "day": "2026-11-01",
        "tenant": "lost",
        "model": "m",
        "class": "interactive",
        "requests": "2",
        "retried_requests": "1",
        "recomputed_tokens": "180",
        "unbilled_input_tokens": "60",
        "unbilled_output_tokens": "50",
    }
    (cost,) = ask(engine, "SELECT requests, uncached_tokens, output_tokens FROM costs WHERE tenant = 'lost'")
    assert cost == {"requests": "3", "uncached_tokens": "120", "output_tokens": "130"}


def test_latencies_are_of_requests_that_ended_normally(store: BillingStore, engine: ReadOnlyEngine) -> None:
    rng = random.Random(9)
    same = {"model": "m", "priority": 1, "accepted_at": NOVEMBER}
    usages = [
        make_usage(rng, "slow", **same, first_token_ms=n, ended_at=NOVEMBER + 10 * n) for n in range(1, 101)
    ]
    usages.append(make_usage(rng, "slow", **same, finish_reason="error", ended_at=NOVEMBER + DAY_MS))
    store.insert([row_of(usage) for usage in usages])
    (row,) = ask(engine, "SELECT * FROM latencies WHERE tenant = 'slow'")
    assert row["requests"] == "100"
    first, total = (
        msgspec.json.decode(row[name], type=list[float])
        for name in ("first_token_ms_p50_p95_p99", "total_ms_p50_p95_p99")
    )
    assert first == pytest.approx([50, 95, 99], abs=1)
    assert total == pytest.approx([500, 950, 990], abs=10)
