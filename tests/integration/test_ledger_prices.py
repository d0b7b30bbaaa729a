"""Prices by the command line, through Kafka, into a running ledger's tables; and the invoice they make."""

import asyncio
import json
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from infra.cli import app
from schemas import topics
from schemas.records import Price
from schemas.topics import Layout
from tests.integration.test_ledger_process import eventually, make_usage, send_usage
from tests.ledger_driver import LedgerDriver, echo
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LedgerProcess]:
    ledger = LedgerProcess(kafka, LAYOUT, tmp_path_factory.mktemp("ledger") / "data")
    await ledger.start()
    yield ledger
    await ledger.kill()


async def headrace(*args: str, status: int = 0) -> str:
    """What it prints."""
    result = await asyncio.to_thread(CliRunner().invoke, app, args)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


async def test_prices_by_the_command_line_make_an_invoice(kafka: str, ledger: LedgerProcess) -> None:
    server, sql = ("--kafka", kafka), ("--url", f"http://127.0.0.1:{ledger.sql_port}")
    amounts = ("--input", "1.5", "--cached-input", "0.3", "--output", "6")
    late = await headrace("price", "set", "m", *amounts, "--from", "2025-11-01", *server, status=1)
    assert "--past" in late
    begin = ("--from", "2025-11-01", "--past")
    told = await headrace("price", "set", "m", *amounts, *begin, "--batch-discount", "50", *server)
    assert told.splitlines()[2] == (
        "m batch from 2025-11-01T00:00:00.000Z: input 0.75, cached input 0.15, output 3 USD a million"
    )
    # The same price set again replaces; what is no price stops nobody.
    async with LedgerDriver(kafka, LAYOUT, echo) as driver:
        changed = ("--input", "2", "--output", "6", "--class", "interactive")
        await headrace("price", "set", "m", *changed, *begin, *server)
        await headrace("price", "set", "m", "--input", "9", "--output", "9", *server)
        await headrace("price", "set", "gone", "--input", "9", "--output", "9", *begin, *server)
        await headrace("price", "remove", "gone", *begin, *server)
        listed = json.loads(await headrace("price", "list", "--json", *server))
        assert [(each["class"], each["input_price"]) for each in listed] == [
            (label, amount)
            for label, first in (("interactive", "2"), ("free", "1.5"), ("batch", "0.75"))
            for amount in (first, "9")
        ]
        await driver.send(topics.PRICES, 0, Price("m", 0, 0, "$", "1", "1", "1"), b"0/0/m")
        rng = random.Random(1)
        usages = [make_usage(rng, "demo") for _ in range(2)]
        for usage, model, priority in zip(usages, ("m", "unpriced"), (0, 2), strict=True):
            usage.model, usage.priority, usage.accepted_at = model, priority, 1_764_446_000_000
            usage.input_tokens, usage.cached_tokens, usage.output_tokens = 1_000_000, 250_000, 10
            await send_usage(driver, usage)
    await eventually(ledger, "SELECT sum(requests), sum(cost) FROM costs", "2\t2.00006\n")
    await eventually(ledger, "SELECT count() FROM price_list", f"{len(listed)}\n")
    invoice = json.loads(await headrace("invoice", "demo", "--month", "2025-11", "--json", *sql))
    assert invoice["totals"] == [{"currency": "USD", "exact": "2.00006", "rounded": "2.00"}]
    assert [(line["kind"], line["tokens"], line["amount"]) for line in invoice["lines"]] == [
        ("input", 750_000, "1.50"),
        ("cached_input", 250_000, "0.50"),
        ("output", 10, "0.00006"),
        ("input", 750_000, None),
        ("cached_input", 250_000, None),
        ("output", 10, None),
    ]
    assert (invoice["complete"], invoice["unpriced_tokens"]) == (False, 1_000_010)
    text = await headrace("invoice", "demo", "--month", "2025-11", *sql)
    assert "total 2.00 USD (2.00006 exactly)" in text
    assert "1,000,010 tokens have no price" in text
    assert "write it as 2026-11" in await headrace("invoice", "demo", "--month", "x", *sql, status=1)


async def test_a_ledger_that_begins_anew_holds_the_same_prices(kafka: str, ledger: LedgerProcess) -> None:
    before = await ledger.sql("SELECT * FROM price_list ORDER BY ALL")
    await ledger.kill()
    await ledger.start()
    assert await ledger.sql("SELECT * FROM price_list ORDER BY ALL") == before != ""


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--input", "0.1234567", "--output", "1"), "input_price"),
        (("--input", "1", "--output", "-1"), "output_price"),
        (("--input", "1", "--output", "1", "--currency", "dollars"), "currency"),
        (("--input", "1", "--output", "1", "--class", "gold"), "--class"),
        (("--input", "1", "--output", "1", "--from", "noon"), "--from"),
        (("--input", "1", "--output", "1", "--batch-discount", "101"), "batch_discount"),
        (("--input", "1", "--output", "1", "--batch-discount", "5", "--class", "free"), "batch_discount"),
    ],
)
async def test_what_is_no_price_is_refused_by_name(kafka: str, args: tuple[str, ...], field: str) -> None:
    assert field in await headrace("price", "set", "m", *args, "--kafka", kafka, status=1)
