"""One admission process on a real broker: requests a second, CPU a request, latency; by tenants and queue.

Owners and a worker are played: a request is a record on inference.requests, it is over when its Dispatch is
read from the worker's mailbox, and the worker ends it with a usage row. For each number of tenants and length
of the queue, a new process:

- `requests_per_s`, `cpu_ms_per_request`: with up to `--window` requests on their way, all that the process
  does for them, usage rows, answers and decision log included. On a machine that others use, trust the CPU
  time: `requests_per_s_by_cpu` is what one core would do.
- `latency_ms_p50`: one request at a time, from its send to its Dispatch in the mailbox.

With a queue, that many requests of class free wait for a worker that is full, of all tenants by turns; what
is measured are interactive requests, for each of which the worker ends one that it holds. So a request is let
in, waits its turn, and takes the seat that becomes free, while the queue stays as long as it is.
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
_SEATS_OF_FULL = 64
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
                cpu, machine = _cpu_s(child), cpu_times()
                elapsed = await self._rate(options.requests, options.window)
                cpu, foreign = _cpu_s(child) - cpu, cpu_times().foreign_share_since(machine)
        return {
            "requests_per_s": round(options.requests / elapsed),
            "requests_per_s_by_cpu": round(options.requests / cpu),
            "cpu_ms_per_request": round(cpu * 1_000 / options.requests, 3),
            "latency_ms_p50": round(percentile(latencies, 0.5), 2),
            "latency_ms_p99": round(percentile(latencies, 0.99), 2),
            "foreign_cpu_share": round(foreign, 3),
        }

    async def _fill(self, child: Child) -> None:
        """Makes the worker full and lets the queue wait for it."""
        fleet = self._fleet
        fleet.max_num_seqs, fleet.ends_at_once = _SEATS_OF_FULL, False
        await asyncio.sleep(0.5)  # its next heartbeats say so
        done = len(fleet.dispatched_at)
        for _ in range(self._queue + _SEATS_OF_FULL):
            await self._send(PriorityClass.FREE)
        await fleet.producer.flush()
        await fleet.until_dispatched(done + _SEATS_OF_FULL, _TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while (queued := await asyncio.to_thread(_queued, child)) < self._queue:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{queued} of {self._queue} requests wait after {_TIMEOUT_S} s")
            await asyncio.sleep(0.2)

    async def _latencies(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            found.append(await self._singly())
            await asyncio.sleep(0.005)
        return found

    async def _singly(self) -> float:
        """One request, in ms."""
        fleet = self._fleet
        began = time.perf_counter()
        request_id = await self._send(PriorityClass.INTERACTIVE)
        async with asyncio.timeout(_TIMEOUT_S):
            while request_id not in fleet.dispatched_at:
                await fleet.end(1)
                await fleet.until_dispatched(len(fleet.dispatched_at) + 1, _TIMEOUT_S)
        return (fleet.dispatched_at[request_id] - began) * 1_000

    async def _rate(self, count: int, window: int) -> float:
        """How long it takes (s) until as many requests more are dispatched."""
        fleet = self._fleet
        began, done = time.perf_counter(), len(fleet.dispatched_at)
        for sent in range(count):
            if sent >= window:
                await fleet.until_dispatched(done + sent - window, _TIMEOUT_S)
            await self._send(PriorityClass.INTERACTIVE)
            await fleet.end(1)
        await fleet.until_dispatched(done + count, _TIMEOUT_S)
        return time.perf_counter() - began

    async def _send(self, priority: PriorityClass) -> bytes:
        self._sent += 1
        return await self._fleet.send(self._sent % self._tenants, priority)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Child]:
        port = claim_port(0, "admission", random.Random())
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        env |= _SETTINGS | {
            "HEADRACE_KAFKA": self._kafka,
            "HEADRACE_HTTP_PORT": str(port),
            "HEADRACE_SHARDS": str(_LAYOUT.shards),
            "HEADRACE_WORKER_SLOTS": str(_LAYOUT.worker_slots),
            "HEADRACE_GATEWAY_SLOTS": str(_LAYOUT.gateway_slots),
            "HEADRACE_MODELS_DIR": str(self._folder / "models"),
        }
        argv = (sys.executable, "-m", "streams", "admission")
        child = Child(ChildSpec("admission", argv, env, self._folder / "admission.log", http_ready(port)))
        await child.start()
        try:
            yield child
        finally:
            await child.stop()


def _cpu_s(child: Child) -> float:
    return cpu_seconds({"admission": child.pid})["admission"]


def _queued(child: Child) -> float:
    """Requests that wait in class free, by the process's own figures."""
    url = f"http://127.0.0.1:{child.spec.env['HEADRACE_HTTP_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    name = 'headrace_admission_queued_requests{class="free"} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))
