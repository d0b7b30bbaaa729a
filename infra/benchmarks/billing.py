"""Billing: rows a second from the topic into the table, and the time of an invoice beside 10 million rows.

`load_rows_per_s`: rows put into headrace.usage by Arrow, some of them twice and some outranked by a later
attempt; then a ledger process opens the table. `rows_per_s`: usage records that lie on inference.usage when
it starts, from its first rows until the last one can be read. `invoice_s`: `headrace invoice`'s query over
the SQL endpoint, for a tenant whose requests are 1 % of all and lie in the month that is asked for (median
of several). `costs_s`: what the requests of all tenants in that month cost. All with the limits that the
ledger's SQL endpoint has by default: one thread and 256 MiB a query. Where others use the processors too,
the CPU times tell more than the clock: `ledger_cpu_us_per_row`, `invoice_cpu_s`.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import numpy as np
import pyarrow as pa
from aiokafka import AIOKafkaProducer

from infra.benchmarks.bench_stack import bench_stack
from infra.benchmarks.billing_rows import outranking, usage_rows
from infra.benchmarks.figures import cpu_seconds
from infra.benchmarks.machine import wait_for_calm
from infra.invoice import invoice_query
from schemas import topics
from schemas.catalog import SIMULATED_MODEL
from schemas.codec import encode
from schemas.fleet import PRODUCER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.prices import price_key
from schemas.records import Price, Usage
from schemas.topics import Layout
from streams.ledger.clickhouse import BillingStore
from streams.ledger.prices import price_row

_MODEL = "m"
_TENANT = "one-percent"
_OTHERS = 200
_MONTHS = (datetime(2026, 10, 1), datetime(2026, 11, 1))
_PRICED_FROM = int(datetime(2026, 1, 1).timestamp() * 1000)
_ROWS_AT_ONCE = 250_000
# Shares of all rows.
_DOUBLED, _OUTRANKED = 0.01, 0.02
_RECORDS_AT_ONCE = 2_000
_QUERIES = 9
_TIMEOUT_S = 1_800.0
_LAYOUT = Layout()
_LEDGER = "ledger-0"
# Found by the table's key: asked for often, it must not be what the processors are busy with.
_LANDED = "SELECT count() FROM usage WHERE tenant >= 'topic-' AND tenant < 'topic.'"
_POLL_S = 0.25
# A busy machine is measured too, where a query takes longer than the ledger allows by default.
_SQL_S = 120
_DDL = Path(__file__).parents[1] / "clickhouse"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=10_000_000, help="in the table")
    parser.add_argument("--records", type=int, default=200_000, help="through the topic")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds to wait for others to be quiet")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name) / "clickhouse"
        report(f"{options.rows} rows into the table")
        figures = await asyncio.to_thread(_load, folder, options.rows)
        settings = {"ledger": {"HEADRACE_CLICKHOUSE": f"chdb://{folder}", "HEADRACE_SQL_TIME_S": str(_SQL_S)}}
        nobody_else = {"workers": 0, "gateways": 0, "admissions": 0, "models": (SIMULATED_MODEL,)}
        async with bench_stack(report, models_dir=Path(), settings=settings, **nobody_else) as bench:
            stack = bench.stack
            # All records are there before the ledger is: what it takes is measured, not what a client sends.
            stack.kill(_LEDGER)
            report(f"{options.records} records onto the topic")
            await _send(stack.bootstrap_servers, options.records)
            await wait_for_calm(options.calm, report)
            report("from the topic into the table")
            await stack.restart(_LEDGER)
            ledger = stack.child(_LEDGER).pid
            async with httpx.AsyncClient(base_url=stack.sql_url, timeout=_SQL_S * 1.5) as client:
                figures |= await _take(client, ledger, options.records)
                report("invoices")
                figures |= await _ask(client, ledger, report)
    return figures


def _load(folder: Path, count: int) -> dict[str, Any]:
    store = BillingStore(f"chdb://{folder}")
    client = clickhouse_connect.get_client(dsn=f"chdb://{folder}")
    try:
        store.migrate(_DDL)
        for priority in range(topics.NUM_CLASSES):
            price = Price(_MODEL, priority, _PRICED_FROM, "USD", "1.25", "0.3", "5")
            key = price_key(_MODEL, priority, _PRICED_FROM)
            store.insert_prices([price_row(key, price, priority)])
            noon = replace(
                price, valid_from=int(datetime(2026, 11, 14, 12).timestamp() * 1000), output_price="4"
            )
            key = price_key(_MODEL, priority, noon.valid_from)
            store.insert_prices([price_row(key, noon, priority + topics.NUM_CLASSES)])
        loading_s, written = 0.0, 0
        for rows in _batches(count):
            began = time.perf_counter()
            client.insert_arrow("headrace.usage", rows)
            loading_s += time.perf_counter() - began
            written += len(rows)
        return {"load_rows_per_s": round(written / loading_s), "rows": written}
    finally:
        client.close()
        store.close()


def _batches(count: int) -> Iterator[pa.Table]:
    """`count` rows in all. What is doubled or outranked comes later than what it doubles or outranks."""
    draw = np.random.default_rng(8)
    others = np.array([f"tenant-{n:03}" for n in range(_OTHERS)], dtype=object)
    again: list[pa.Table] = []
    num_first = round(count * (1 - _DOUBLED - _OUTRANKED))
    for begin in range(0, num_first, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, num_first - begin)
        month = _MONTHS[begin // _ROWS_AT_ONCE % 2]
        tenants = draw.choice(others, size)
        if month == _MONTHS[-1]:
            tenants[draw.random(size) < 0.01 * len(_MONTHS)] = _TENANT
        rows = usage_rows(draw, tenants, month, _MODEL)
        doubled, outranked = (round(size * share) for share in (_DOUBLED, _OUTRANKED))
        again += [rows.slice(0, doubled), outranking(draw, rows.slice(doubled, outranked))]
        yield rows
    yield pa.concat_tables(again, promote_options="default").unify_dictionaries().combine_chunks()


async def _send(bootstrap_servers: str, count: int) -> None:
    draw = np.random.default_rng(9)
    producer = AIOKafkaProducer(**client_settings(bootstrap_servers), **PRODUCER_SETTINGS)
    await producer.start()
    try:
        for begin in range(0, count, _RECORDS_AT_ONCE):
            sent = []
            for _ in range(min(_RECORDS_AT_ONCE, count - begin)):
                usage = _usage(draw)
                partition = topics.tenant_partition(usage.tenant, usage.priority, _LAYOUT.shards)
                sent.append(await producer.send(topics.USAGE, encode(usage), partition=partition))
            await asyncio.gather(*sent)
    finally:
        await producer.stop()


def _usage(draw: np.random.Generator) -> Usage:
    tenant, priority, accepted_at = int(draw.integers(50)), int(draw.integers(3)), 1_798_761_600_000
    return Usage(
        request_id=draw.bytes(16),
        attempt=1,
        sealed=False,
        tenant=f"topic-{tenant}",
        priority=priority,
        model=_MODEL,
        input_tokens=int(draw.integers(1, 4_000)),
        cached_tokens=0,
        output_tokens=int(draw.integers(500)),
        finish_reason="stop",
        accepted_at=accepted_at,
        ended_at=accepted_at + 900,
        slot=0,
        epoch=7,
        first_token_ms=100,
    )


async def _take(client: httpx.AsyncClient, ledger: int, count: int) -> dict[str, Any]:
    began = first = time.perf_counter()
    before = seen = 0
    cpu = 0.0
    while seen < count:
        if time.perf_counter() - began > _TIMEOUT_S:
            raise RuntimeError(f"{seen} of {count} rows are there after {_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)
        seen = int(await _sql(client, _LANDED))
        if not before and seen:
            # From the first rows that are seen: the process's own start is not counted.
            before, first, cpu = seen, time.perf_counter(), _cpu_s(ledger)
    rows, elapsed, cpu = count - before, time.perf_counter() - first, _cpu_s(ledger) - cpu
    return {
        "records": count,
        "rows_per_s": round(rows / elapsed),
        "ledger_cpu_us_per_row": round(cpu / max(1, rows) * 1e6, 1),
    }


async def _ask(client: httpx.AsyncClient, ledger: int, report: Callable[[str], None]) -> dict[str, Any]:
    invoice = invoice_query(_TENANT, _MONTHS[-1].date())
    costs = "SELECT sum(cost), sum(requests) FROM costs WHERE day >= '2026-11-01' AND day < '2026-12-01'"
    share = "SELECT countIf(tenant = '{}') / count() FROM usage_final WHERE NOT startsWith(tenant, 'topic-')"
    cpu = _cpu_s(ledger)
    lines, invoice_s = await _timed(client, invoice)
    cpu = _cpu_s(ledger) - cpu
    if not lines:
        raise RuntimeError(f"the invoice of {_TENANT} has no lines: more --rows are needed")
    report(f"an invoice takes {statistics.median(invoice_s):.3f} s, {cpu / len(invoice_s):.3f} s of CPU")
    _, costs_s = await _timed(client, costs, queries=1)
    return {
        "invoice_s": round(statistics.median(invoice_s), 3),
        "invoice_s_max": round(max(invoice_s), 3),
        "invoice_cpu_s": round(cpu / len(invoice_s), 3),
        "invoice_lines": len(lines.splitlines()),
        "tenant_share": round(float(await _sql(client, share.format(_TENANT))), 4),
        "costs_s": round(costs_s[0], 3),
    }


def _cpu_s(ledger: int) -> float:
    return cpu_seconds({_LEDGER: ledger})[_LEDGER]


async def _sql(client: httpx.AsyncClient, query: str) -> str:
    response = await client.post("/", content=query)
    if response.status_code != 200:
        raise RuntimeError(f"{query}: {response.text}")
    return response.text


async def _timed(client: httpx.AsyncClient, query: str, queries: int = _QUERIES) -> tuple[str, list[float]]:
    answer, times = "", []
    for _ in range(queries):
        began = time.perf_counter()
        answer = await _sql(client, query)
        times.append(time.perf_counter() - began)
    return answer, times
