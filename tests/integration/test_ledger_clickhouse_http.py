"""The same store code against ClickHouse's HTTP protocol, served here by the embedded engine with writes."""

import asyncio
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import chdb
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from schemas.prices import price_key
from schemas.records import Price, Usage
from schemas.topics import Layout
from streams.http import HttpServer, bind
from streams.ledger import store_opening
from streams.ledger.billing import row_of
from streams.ledger.clickhouse import BillingStore, MigrationError
from streams.ledger.comparison import UsageTable, differing_days, differing_rows
from streams.ledger.prices import price_row
from streams.ledger.rebuilding import Rebuilding
from streams.ledger.spend_tables import SpendTables
from streams.ledger.spending import Alert, alert_row
from tests.ledger_process import LedgerProcess

ACCEPTED_AT = 1_764_446_000_123
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
DDL = Path(__file__).parents[2] / "infra" / "clickhouse"
_INSERT = re.compile(rb"(?P<into>INSERT INTO .*?)\s*FORMAT (?P<format>\w+)\n?", re.DOTALL | re.IGNORECASE)
_FORMAT = re.compile(r"\bFORMAT (\w+)\s*$")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """(address, engine handle)."""
    sock = bind("127.0.0.1", 0)
    with serving(tmp_path, sock) as handle:
        yield f"127.0.0.1:{sock.getsockname()[1]}", handle


@contextmanager
def serving(tmp_path: Path, sock: socket.socket) -> Iterator[Any]:
    """The engine's handle, while the server answers on `sock`."""
    handle = chdb.connect(str(tmp_path / "data"))

    async def serve(request: Request) -> Response:
        text = "\n".join(filter(None, [request.query_params.get("query"), (await request.body()).decode()]))
        try:
            if insert := _INSERT.match(text.encode()):
                with tempfile.NamedTemporaryFile(dir=tmp_path) as rows:
                    rows.write(text.encode()[insert.end() :])
                    rows.flush()
                    into, kind = insert["into"].decode(), insert["format"].decode()
                    handle.query(f"{into} FROM INFILE '{rows.name}' FORMAT {kind}")
                return Response()
            body = handle.query(text, "TabSeparated").bytes()
        except Exception as e:
            return PlainTextResponse(str(e), 500, {"x-clickhouse-exception-code": "1000"})
        found = _FORMAT.search(text)
        return Response(body, headers={"x-clickhouse-format": found[1] if found else "TabSeparated"})

    http: uvicorn.Server = HttpServer(Starlette(routes=[Route("/", serve, methods=["GET", "POST"])]))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
    thread.start()
    deadline = time.monotonic() + 10
    while not http.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield handle
    finally:
        http.should_exit = True
        thread.join(10)
        handle.close()


def test_schema_and_rows_reach_a_server(server: tuple[str, Any]) -> None:
    address, handle = server
    store = BillingStore(f"http://default:@{address}")
    assert store.migrate(DDL) == [path.name for path in sorted(DDL.glob("*.sql"))]
    assert store.migrate(DDL) == []
    usages = [
        Usage(bytes([n] * 16), 1, False, "demo", 2, "m", 10, 0, n, "stop", ACCEPTED_AT, ACCEPTED_AT + 1)
        for n in range(3)
    ]
    store.insert([row_of(usage) for usage in usages])
    store.insert([row_of(usage) for usage in usages])
    price = Price("m", 2, 0, "USD", "1.5", "1.5", "0.000001")
    store.insert_prices([price_row(price_key("m", 2, 0), price, 0)])
    store.close()
    rows = handle.query(
        "SELECT kind, tokens, amount FROM headrace.invoice(tenant = 'demo', month = '2025-11-01')"
    )
    assert rows.bytes() == b'"input",30,0.000045\n"output",3,0.000000000003\n'
    bill = handle.query("SELECT requests, output_tokens FROM headrace.billing", "TabSeparated")
    assert bill.bytes() == b"3\t3\n"
    when = handle.query("SELECT DISTINCT accepted_at FROM headrace.usage", "TabSeparated")
    assert when.bytes() == b"2025-11-29 19:53:20.123\n"


def test_spend_alerts_and_a_rebuild_work_over_it(server: tuple[str, Any]) -> None:
    address, _ = server
    # Within what usage_rows keeps.
    asked_at = time.time_ns() // 1_000_000 - 3_600_000
    told_at = datetime.fromtimestamp(asked_at // 1000, UTC)
    month, day_asked = f"{told_at:%Y-%m}", f"{told_at:%Y-%m-%d}"
    dsn = f"http://default:@{address}"
    store, tables = BillingStore(dsn), SpendTables(dsn)
    store.migrate(DDL)
    first = [
        row_of(Usage(bytes([n] * 16), 1, False, "demo", 2, "m", 10, 0, n, "stop", asked_at, asked_at))
        for n in range(3)
    ]
    retried = row_of(Usage(bytes(16), 2, True, "demo", 2, "m", 10, 0, 7, "stop", asked_at, asked_at, 0, 1))
    store.insert([*first, retried])
    store.insert_prices([price_row(price_key("m", 2, 0), Price("m", 2, 0, "USD", "1.5", "1.5", "2"), 0)])
    spent = {"USD": Decimal("0.000065")}
    assert tables.spend(["demo", "other"], [month]) == {("demo", month): spent}
    alert = Alert("demo", month, 80, Decimal("0.00005"), "USD", spent["USD"])
    tables.insert_alerts([alert_row(alert, asked_at, told_at)])
    assert store.ask("SELECT tenant, spent FROM headrace.budget_alerts") == [("demo", spent["USD"])]

    # The log has a row less, and one more: both tables are made anew from it.
    other = Usage(bytes([9] * 16), 1, False, "demo", 2, "m", 1, 0, 1, "stop", asked_at, asked_at)
    log = [first[1], retried, row_of(other)]
    building = Rebuilding(store, to_swap=True)
    building.insert(log)
    (day,) = differing_days(building.rebuilt, building.in_use)
    assert (day.tenant, day.day, day.log.rows, day.table.rows) == ("demo", day_asked, 3, 3)
    rows = differing_rows(building.rebuilt, building.in_use, day)
    named = {row.request_id: (row.log is None, row.table is None) for row in rows}
    assert named == {"02" * 16: (True, False), "09" * 16: (False, True)}
    building.swap()
    assert differing_days(UsageTable(store.ask), UsageTable(store.ask, "usage")) == []
    for table, count in (("usage", 3), ("usage_rows", 3), ("usage_replaced", 3), ("usage_rows_replaced", 4)):
        assert store.ask(f"SELECT count() FROM headrace.{table} FINAL") == [(count,)], table
    tables.close()
    store.close()


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(Exception, match=str(port)) as caught:
        BillingStore(f"http://user:secret@127.0.0.1:{port}")
    assert "secret" not in str(caught.value)


async def test_a_ledger_that_starts_first_waits_for_the_server_and_goes_on_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_opening, "ANSWER_S", 1)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    dsn, told = f"http://user:secret@127.0.0.1:{port}", list[str]()
    opening = asyncio.create_task(store_opening.open_tables(dsn, DDL, told.append))

    async def told_more() -> None:
        known = len(told)
        async with asyncio.timeout(10):
            while len(told) < known + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all(why.startswith("waiting for ClickHouse: ") and str(port) in why for why in told)

    # Nobody listens there; then somebody that never answers.
    await told_more()
    sock.listen()
    await told_more()
    sock.close()
    with serving(tmp_path, bind("127.0.0.1", port)) as handle:
        store = await asyncio.wait_for(opening, 30)
        usage = Usage(bytes(16), 1, False, "demo", 2, "m", 10, 0, 3, "stop", ACCEPTED_AT, ACCEPTED_AT + 1)
        await asyncio.to_thread(store.insert, [row_of(usage)])
        bill = handle.query("SELECT requests, output_tokens FROM headrace.billing", "TabSeparated")
        assert bill.bytes() == b"1\t3\n"
        store.close()
    assert "secret" not in "".join(told)


async def test_what_waiting_does_not_mend_ends_it(server: tuple[str, Any], tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(MigrationError, match="HEADRACE_DDL_DIR"):
        await store_opening.open_tables(f"http://default:@{server[0]}", tmp_path / "none", told.append)
    assert told == []


async def test_the_process_says_what_it_waits_for_and_is_ready_once_the_server_is_there(
    kafka: str, tmp_path: Path
) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    dsn = f"http://user:secret@127.0.0.1:{port}"
    ledger = LedgerProcess(kafka, LAYOUT, tmp_path / "ledger", HEADRACE_CLICKHOUSE=dsn)
    await ledger.start(wait=False)
    try:
        async with asyncio.timeout(20):
            while "waiting for ClickHouse: " not in (said := await ledger.readiness()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert str(port) in said
        assert "secret" not in said
        with serving(tmp_path, bind("127.0.0.1", port)):
            await ledger.ready()
            assert await ledger.stop() == 0, ledger.log_end()
    finally:
        await ledger.kill()
