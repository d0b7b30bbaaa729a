"""Batches of a file's lines: items a second, the coordinator's memory, and streams beside a batch.

`scale`: files of few and of many items (10 tokens in, 1 out) through the whole pipeline with an engine that
costs nothing. `items_per_s` is from the answer to POST /v1/batches to the end; `finalize_s` from the last
item's end; `ledger_rss_mb_above_idle` the most that the ledger's processes had over what they had before.
`beside`: interactive streams on simulated GPUs at their real speed, alone and then while a batch runs.
`prefixes`: a file whose lines have one of many system prompts, in no order, on simulated GPUs that cache some
of them: sent as they stand, and with those that begin alike together.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer, TopicPartition

from infra.benchmarks.bench_stack import BenchStack, bench_stack
from infra.benchmarks.figures import percentile, resident_bytes
from infra.benchmarks.machine import wait_for_calm
from infra.benchmarks.sse_client import StreamTimes, stream
from schemas.api.batches import ENDED
from schemas.catalog import SIMULATED_MODEL
from schemas.codec import decode
from schemas.kafka_login import client_settings
from schemas.records import BatchState
from schemas.topics import BATCH_STATES

_LEDGER = "ledger-0"
_POLL_S = 0.25
_IDLE_S = 3.0
_TIMEOUT_S = 3_600.0
_SYSTEM_PROMPTS, _SYSTEM_TOKENS, _PREFIX_ITEMS = 64, 2_000, 2_000
_GPUS = {
    "worker": {"HEADRACE_SIMULATED_GPU": "h100", "HEADRACE_INTER_TOKEN_TARGET_MS": "40"},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=int, nargs=2, default=(10_000, 100_000), help="few and many")
    parser.add_argument("--seconds", type=float, default=60.0, help="of streams alone, and beside a batch")
    parser.add_argument("--rate", type=float, default=4.0, help="streams begun a second")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds to wait for others to be quiet")
    parser.add_argument("--only", choices=("scale", "beside", "prefixes"))


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if options.only in (None, "scale"):
        figures |= await _scale(options, report)
    if options.only in (None, "beside"):
        figures |= await _beside(options, report)
    if options.only in (None, "prefixes"):
        figures["prefixes"] = await _prefixes(options, report)
    return figures


async def _scale(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with bench_stack(
        report, models_dir=Path(), models=(SIMULATED_MODEL,), runner="simulated", step_ms=0.0
    ) as bench:
        ledger = bench.stack.child(_LEDGER).pid
        await wait_for_calm(options.calm, report)
        await asyncio.sleep(_IDLE_S)
        idle = resident_bytes(ledger)
        for label, count in zip(("few", "many"), options.items, strict=True):
            report(f"{count} items")
            lines = [_line(i, f"{i:010d}", 1) for i in range(count)]
            async with _watched(ledger) as memory, _client(bench) as client:
                batch_id, elapsed = await _run_batch(client, lines)
            ended = await _last_state(
                bench.stack.bootstrap_servers, bench.stack.config.layout.shards, batch_id
            )
            figures[label] = {
                "items": count,
                "items_per_s": round(count / elapsed, 1),
                "finalize_s": round(((ended.ended_at or 0) - (ended.finalizing_at or 0)) / 1000, 3),
                "ledger_rss_mb_above_idle": round((max(memory) - idle) / 1e6, 1),
            }
    return {**figures["many"], "few": figures["few"], "idle_rss_mb": round(idle / 1e6, 1)}


async def _beside(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    async with bench_stack(
        report, models_dir=Path(), models=(SIMULATED_MODEL,), runner="simulated", settings=_GPUS
    ) as bench:
        await _streams(bench, 2.0, options.rate)
        await wait_for_calm(options.calm, report)
        report("streams alone")
        alone = await _streams(bench, options.seconds, options.rate)
        report("streams beside a batch")
        lines = [_line(i, f"{i:08d}".ljust(500, "x"), 100) for i in range(20_000)]
        async with _client(bench) as client:
            batch_id = await _start_batch(client, lines)
            await asyncio.sleep(5.0)
            before, began = await _batch(client, batch_id), time.perf_counter()
            beside = await _streams(bench, options.seconds, options.rate)
            after, elapsed = await _batch(client, batch_id), time.perf_counter() - began
            await client.post(f"/v1/batches/{batch_id}/cancel")
    done = after["usage"]["output_tokens"] - before["usage"]["output_tokens"]
    p99 = {
        name: percentile([t.ttft_ms for t in times], 0.99) for name, times in (("a", alone), ("b", beside))
    }
    return {
        "interactive_ttft_ms_p50": round(percentile([t.ttft_ms for t in beside], 0.5), 1),
        "interactive_ttft_ms_p99": round(p99["b"], 1),
        "interactive_tpot_ms_p99": round(percentile([_tpot_ms(t) for t in beside], 0.99), 2),
        "interactive_ttft_p99_ratio": round(p99["b"] / p99["a"], 3),
        "alone_ttft_ms_p50": round(percentile([t.ttft_ms for t in alone], 0.5), 1),
        "alone_tpot_ms_p99": round(percentile([_tpot_ms(t) for t in alone], 0.99), 2),
        "streams": len(beside),
        "batch_output_tokens_per_s": round(done / elapsed, 1),
    }


async def _prefixes(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    draw = random.Random(5)
    prompts = [f"{draw.random():.12f}".ljust(_SYSTEM_TOKENS, "s") for _ in range(_SYSTEM_PROMPTS)]
    lines = [_line(i, f"{draw.choice(prompts)}{i:08d}", 8) for i in range(_PREFIX_ITEMS)]
    figures: dict[str, Any] = {}
    for label, ordered in (("as_it_stands", "false"), ("in_prefix_order", "true")):
        settings = {
            # Memory for the prompts of those that run, and a part of the system prompts.
            "worker": {"HEADRACE_SIMULATED_GPU": "h100", "HEADRACE_KV_MEMORY_MIB": "8192"},
            "ledger": {"HEADRACE_BATCH_PREFIX_ORDER": ordered},
        }
        async with bench_stack(
            report, models_dir=Path(), models=(SIMULATED_MODEL,), runner="simulated", settings=settings
        ) as bench:
            report(f"prefixes, {label}")
            async with _client(bench) as client:
                batch_id, elapsed = await _run_batch(client, lines)
                usage = (await _batch(client, batch_id))["usage"]
        hits = usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"]
        figures[label] = {"items_per_s": round(len(lines) / elapsed, 1), "hit_rate": round(hits, 3)}
    return figures


def _tpot_ms(times: StreamTimes) -> float:
    """Time per output token behind the first."""
    return (times.token_at[-1] - times.token_at[0]) * 1000 / max(1, times.output_tokens - 1)


async def _streams(bench: BenchStack, seconds: float, rate: float) -> list[StreamTimes]:
    """Arrivals are Poisson's, the same each time."""
    draw = random.Random(7)
    tasks = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        prompt = f"{draw.random():.12f}".ljust(500, "y")
        body = {"model": SIMULATED_MODEL, "prompt": prompt, "max_tokens": 64, "ignore_eos": True}
        tasks.append(asyncio.create_task(stream(bench.stack.url(), bench.api_key, body)))
        await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


def _line(index: int, prompt: str, max_tokens: int) -> bytes:
    body = {"model": SIMULATED_MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    line = {"custom_id": f"item-{index}", "method": "POST", "url": "/v1/generate", "body": body}
    return json.dumps(line).encode()


def _client(bench: BenchStack) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {bench.api_key}"}
    return httpx.AsyncClient(base_url=bench.stack.url(), headers=headers, timeout=120)


async def _start_batch(client: httpx.AsyncClient, lines: list[bytes]) -> str:
    upload = {"file": ("items.jsonl", b"\n".join(lines))}
    file = _ok(await client.post("/v1/files", data={"purpose": "batch"}, files=upload))
    body = {"input_file_id": file["id"], "endpoint": "/v1/generate", "completion_window": "24h"}
    batch_id: str = _ok(await client.post("/v1/batches", json=body))["id"]
    return batch_id


async def _run_batch(client: httpx.AsyncClient, lines: list[bytes]) -> tuple[str, float]:
    """Its id, and seconds."""
    batch_id = await _start_batch(client, lines)
    began = time.perf_counter()
    while (batch := await _batch(client, batch_id))["status"] not in ENDED:
        if time.perf_counter() - began > _TIMEOUT_S:
            raise RuntimeError(f"the batch has not ended in {_TIMEOUT_S:g} s: {batch}")
        await asyncio.sleep(_POLL_S)
    elapsed = time.perf_counter() - began
    if batch["request_counts"]["completed"] != len(lines):
        raise RuntimeError(f"the batch did not do all its items: {batch}")
    return batch_id, elapsed


async def _last_state(kafka: str, shards: int, batch_id: str) -> BatchState:
    """With its times in ms, which no client is told."""
    consumer = AIOKafkaConsumer(
        **client_settings(kafka), auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(BATCH_STATES, shard) for shard in range(shards)])
        found: BatchState | None = None
        while found is None or found.ended_at is None:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    state = decode(record.value or b"")
                    if isinstance(state, BatchState) and state.batch_id == batch_id:
                        found = state
        return found
    finally:
        await consumer.stop()


async def _batch(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    return _ok(await client.get(f"/v1/batches/{batch_id}"))


def _ok(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise RuntimeError(f"{response.request.url}: {response.status_code} {response.text}")
    found: dict[str, Any] = response.json()
    return found


@asynccontextmanager
async def _watched(session: int) -> AsyncIterator[list[int]]:
    """Resident bytes of a session's processes, while inside."""
    seen = [resident_bytes(session)]

    async def look() -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            seen.append(resident_bytes(session))

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()
