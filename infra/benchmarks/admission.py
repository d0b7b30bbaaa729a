"""One admission process on a real broker: requests a second, CPU a request, latency; by tenants and queue.

Owners and a worker are played: a request is a record on inference.requests, it is over when its Dispatch is
read from the worker's mailbox, and the worker ends it with a usage row. For each number of tenants and length
of the queue, a new process:

- `requests_per_s`, `cpu_ms_per_request`: with up to `--window` requests on their way, all that the process
  does for them, usage rows, answers and decision log included. On a machine that others use, trust the CPU
  time: `requests_per_s_by_cpu` is what one core would do. `load_cpu_ms_per_request` is what owners and worker
  take, who share the processors with it and the broker.
- `latency_ms_p50`: one request at a time, from its send to its Dispatch in the mailbox.

With a queue, that many requests of class batch wait, of all tenants by turns, for a worker that holds as many
of them as it may. For the latency interactive requests pass them. For the rate the worker ends one that it
holds for each request more that admission says it has queued, and the next in the queue gets the seat: as
many are let in as are dispatched, and the queue stays as long as it is.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from infra.benchmarks.admission_fleet import BenchFleet
from infra.benchmarks.figures import cpu_seconds, percentile
from infra.benchmarks.machine import cpu_times, wait_for_calm
from infra.local.broker import Broker
from infra.local.child import Child, ChildSpec
from infra.local.health import http_ready
from infra.local.ports import claim_port
from infra.topics.create import create_topics
from schemas.priority import PriorityClass
from schemas.topics import Layout

_LAYOUT = Layout(shards=2, worker_slots=1, gateway_slots=1)
_TIMEOUT_S = 180.0
_FOR_EVER = "1000000000,2000000000,3000000000,4000000000"
_SETTINGS = {
    # What is measured is deciding, not refusing.
    "HEADRACE_MAX_QUEUED_REQUESTS": "1000000",
    "HEADRACE_MAX_QUEUED_TOKENS": "1000000000000",
    "HEADRACE_START_MS_INTERACTIVE": "0",
    "HEADRACE_START_MS_FREE": "0",
    "HEADRACE_SHED_WAIT_MS": _FOR_EVER,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenants", type=int, nargs="+", default=(1, 10_000))
    parser.add_argument("--queue", type=int, nargs="+", default=(0, 50_000))
    parser.add_argument("--requests", type=int, default=8_000, help="for the rate")
    parser.add_argument("--window", type=int, default=256, help="requests on their way at a time")
    parser.add_argument("--singles", type=int, default=200, help="for the latency")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds to wait for others to be quiet")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        broker = Broker(Path(folder), report=report)
        await broker.start()
        try:
            await create_topics(broker.bootstrap_servers, _LAYOUT)
            for tenants in sorted(options.tenants):
                for queue in options.queue:
                    await wait_for_calm(options.calm, report)
                    case = _Case(broker.bootstrap_servers, Path(folder), tenants, queue)
                    name = f"tenants_{tenants}_queue_{queue}"
                    cases[name] = await case.measure(options)
                    report(f"{name}: {cases[name]}")
        finally:
            await broker.stop()
    return {"cases": cases}


def admission_child(kafka: str, folder: Path, layout: Layout, slot: int = 0) -> Child:
    """An admission process that refuses nothing for load; its log is in `folder`."""
    name, port = f"admission-{slot}", claim_port(0, "admission", random.Random())
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    env |= _SETTINGS | {
        "HEADRACE_KAFKA": kafka,
        "HEADRACE_SLOT": str(slot),
        "HEADRACE_HTTP_PORT": str(port),
        "HEADRACE_SHARDS": str(layout.shards),
        "HEADRACE_WORKER_SLOTS": str(layout.worker_slots),
        "HEADRACE_GATEWAY_SLOTS": str(layout.gateway_slots),
        "HEADRACE_MODELS_DIR": str(folder / "models"),
    }
    argv = (sys.executable, "-m", "streams", "admission")
    return Child(ChildSpec(name, argv, env, folder / f"{name}.log", http_ready(port)))


class _Case:
    def __init__(self, kafka: str, folder: Path, tenants: int, queue: int) -> None:
        self._kafka, self._folder = kafka, folder
        self._tenants, self._queue = tenants, queue
        self._fleet = BenchFleet(kafka, _LAYOUT)
        self._sent = 0

    async def measure(self, options: argparse.Namespace) -> dict[str, float]:
        fleet = self._fleet
        async with fleet.running():
            await fleet.put_tenants(range(self._tenants))
            async with self._process() as child:
                await self._rate(500, options.window)  # what is done once, and a warm interpreter
                if self._queue:
                    await self._fill(child)
                latencies = await self._latencies(options.singles)
                waiting = await asyncio.to_thread(_queued, child)
                cpu, own, machine = _cpu_s(child), time.process_time(), cpu_times()
                elapsed = await self._rate(options.requests, options.window)
                cpu, own = _cpu_s(child) - cpu, time.process_time() - own
                foreign = cpu_times().foreign_share_since(machine)
                queued = await asyncio.to_thread(_queued, child)
                # Some seats may be on their way from one to the next.
                if abs(queued - waiting) > fleet.max_num_seqs:
                    raise RuntimeError(
                        f"the queue was to stay at {waiting:.0f} requests, and has {queued:.0f}"
                    )
        return {
            "requests_per_s": round(options.requests / elapsed),
            "requests_per_s_by_cpu": round(options.requests / cpu),
            "cpu_ms_per_request": round(cpu * 1_000 / options.requests, 3),
            "load_cpu_ms_per_request": round(own * 1_000 / options.requests, 3),
            "latency_ms_p50": round(percentile(latencies, 0.5), 2),
            "latency_ms_p99": round(percentile(latencies, 0.99), 2),
            "foreign_cpu_share": round(foreign, 3),
        }

    async def _fill(self, child: Child) -> None:
        """Takes the seats that batch may have, and lets the queue wait."""
        for _ in range(self._queue + self._fleet.max_num_seqs):
            await self._send(PriorityClass.BATCH)
        await self._fleet.producer.flush()
        deadline = time.monotonic() + _TIMEOUT_S
        while (queued := await asyncio.to_thread(_queued, child)) < self._queue:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{queued} of {self._queue} requests wait after {_TIMEOUT_S} s")
            await asyncio.sleep(0.5)

    async def _latencies(self, count: int) -> list[float]:
        """Of one request at a time, in ms."""
        fleet, found = self._fleet, []
        for _ in range(count):
            began = time.perf_counter()
            request_id = await self._send(PriorityClass.INTERACTIVE)
            await fleet.until(partial(fleet.dispatched_at.__contains__, request_id), _TIMEOUT_S)
            found.append((fleet.dispatched_at[request_id] - began) * 1_000)
            await asyncio.sleep(0.005)
        return found

    async def _rate(self, count: int, window: int) -> float:
        """How long it takes (s) until as many more are let in and as many are dispatched."""
        fleet = self._fleet
        fleet.ends_for_queued = bool(fleet.held)
        priority = PriorityClass.BATCH if fleet.held else PriorityClass.INTERACTIVE
        began, done, queued = time.perf_counter(), len(fleet.dispatched_at), fleet.num_queued
        for sent in range(count):
            await fleet.until(partial(fleet.has_dispatched, done + sent - window + 1), _TIMEOUT_S)
            await self._send(priority)
        await fleet.until(partial(fleet.has_dispatched, done + count), _TIMEOUT_S)
        elapsed = time.perf_counter() - began
        if fleet.ends_for_queued and fleet.num_queued != queued + count:
            raise RuntimeError(f"{fleet.num_queued - queued} of {count} requests were let in")
        return elapsed

    async def _send(self, priority: PriorityClass) -> bytes:
        self._sent += 1
        return await self._fleet.send(self._sent % self._tenants, priority)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Child]:
        child = admission_child(self._kafka, self._folder, _LAYOUT)
        await child.start()
        try:
            yield child
        finally:
            await child.stop()


def _cpu_s(child: Child) -> float:
    return cpu_seconds({"admission": child.pid})["admission"]


def _queued(child: Child) -> float:
    """Requests that wait in class batch, by the process's own figures."""
    url = f"http://127.0.0.1:{child.spec.env['HEADRACE_HTTP_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    name = 'headrace_admission_queued_requests{class="batch"} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))
