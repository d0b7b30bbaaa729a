"""What tenants spent, by the embedded engine, against plain sums over the same rows; and rows of alerts."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from schemas.prices import price_key
from schemas.records import Price, Usage
from streams.ledger.billing import billed, row_of
from streams.ledger.clickhouse import BillingStore
from streams.ledger.prices import price_row
from streams.ledger.spend_tables import SpendTables
from streams.ledger.spending import Alert, alert_row

DDL = Path(__file__).parents[2] / "infra" / "clickhouse"
DECEMBER = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)
DAY_MS = 86_400_000
PRICES = [Price("m", 0, 0, "USD", "1.25", "0.3", "5.5"), Price("n", 0, 0, "EUR", "0.000001", "0", "7")]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[BillingStore, SpendTables]]:
    dsn = f"chdb://{tmp_path / 'data'}"
    store = BillingStore(dsn)
    store.migrate(DDL)
    rows = [price_row(price_key(p.model, p.priority, p.valid_from), p, 0) for p in PRICES]
    store.insert_prices(rows)
    tables = SpendTables(dsn)
    yield store, tables
    tables.close()
    store.close()


def make_usage(rng: random.Random, tenant: str) -> Usage:
    input_tokens = rng.randrange(1, 5000)
    edge = DECEMBER + rng.randint(-1, 1)
    accepted_at = rng.choice([edge, DECEMBER + rng.randrange(-29 * DAY_MS, 30 * DAY_MS)])
    return Usage(
        rng.randbytes(16), 1, False, tenant, 0, rng.choice(["m", "n", "unpriced"]), input_tokens,
        rng.randrange(input_tokens + 1), rng.randrange(500), "stop", accepted_at, accepted_at + 900, 0, 7,
    )  # fmt: skip


def test_what_is_spent_is_the_exact_sum_of_what_counts(stores: tuple[BillingStore, SpendTables]) -> None:
    store, tables = stores
    rng = random.Random(11)
    usages = [make_usage(rng, tenant) for tenant in ("acme", "other", "not-asked") for _ in range(200)]
    usages += [replace(u, attempt=2, output_tokens=u.output_tokens + 3) for u in rng.sample(usages, 80)]
    usages += rng.choices(usages, k=100)
    rng.shuffle(usages)
    rows = [row_of(usage) for usage in usages]
    prices = {price.model: price for price in PRICES}
    for begin in range(0, len(rows), 250):
        # Asked between inserts too: of the rows so far.
        store.insert(rows[begin : begin + 250])
        exact: dict[tuple[str, str], dict[str, Decimal]] = defaultdict(lambda: defaultdict(Decimal))
        for row in billed(rows[: begin + 250]).values():
            if row.tenant == "not-asked" or (price := prices.get(row.model)) is None:
                continue
            parts = (row.input_tokens - row.cached_tokens, row.cached_tokens, row.output_tokens)
            amounts = (price.input_price, price.cached_input_price, price.output_price)
            exact[row.tenant, f"{row.accepted_at:%Y-%m}"][price.currency] += sum(
                tokens * Decimal(each) / 1_000_000 for tokens, each in zip(parts, amounts, strict=True)
            )
        assert tables.spend(["acme", "other"], ["2026-11", "2026-12"]) == exact
    (only,) = tables.spend(["acme"], ["2026-12"]).items()
    assert only == (("acme", "2026-12"), exact["acme", "2026-12"])


def test_of_an_alert_told_again_the_first_word_stands(stores: tuple[BillingStore, SpendTables]) -> None:
    store, tables = stores
    first = Alert("acme", "2026-12", 80, Decimal("8"), "USD", Decimal("8.25"))
    for alert, hour in ((first._replace(spent=Decimal("9.5")), 2), (first, 1)):
        told_at = datetime(2026, 12, 1, hour, tzinfo=UTC)
        tables.insert_alerts([alert_row(alert, int(told_at.timestamp() * 1000), told_at)])
    (row,) = store.ask("SELECT * FROM headrace.budget_alerts")
    day, at = row[1], row[6]
    assert (row[0], f"{day}", *row[2:6]) == ("acme", "2026-12-01", 80, Decimal("8"), "USD", Decimal("8.25"))
    assert at.hour == 1
