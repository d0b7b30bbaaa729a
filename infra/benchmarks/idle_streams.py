"""Many streams that wait, on one gateway: what each costs in memory and CPU, and whether a new one is served.

The whole pipeline with the simulated runner. The streams that wait are for a model that no worker serves:
their responses are begun, so every one has a connection, two tasks, a place in the owner's book and a
keep-alive comment every ten seconds. New ones, before and beside them, are for a model that is served.

`kib_per_stream` is what the gateway's resident memory grew by; `cpu_share` the CPU time of each process in a
second of waiting; `all_closed_s` how long it takes after all connections were closed at once until the
gateway has no request open.
"""

import argparse
import asyncio
import dataclasses
import json
import re
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from infra.benchmarks.bench_stack import BenchStack, bench_stack
from infra.benchmarks.figures import cpu_seconds, percentile
from infra.benchmarks.sse_client import NATIVE, stream
from schemas.catalog import SIMULATED_MODEL, simulated_model

_GATEWAY = "gateway-0"
_UNSERVED = "unserved"
_TIMEOUT_S = 60.0
_AT_A_TIME = 200
_OPEN = re.compile(r"^headrace_gateway_open_requests (\S+)$", re.MULTILINE)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of waiting that are measured")
    parser.add_argument("--probes", type=int, default=20, help="new streams before, and while all wait")
    parser.add_argument("--step-ms", type=float, default=1.0, help="of the simulated engine")


class _Waiting(asyncio.Protocol):
    """A connection with a stream that is begun; it counts what comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.received = 0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if not self.begun.done():
            self.begun.set_result(data[: data.find(b"\r\n")])

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if not self.begun.done():
            self.begun.set_result(b"the connection was lost")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = str(options.streams + 100)
    settings = {
        "admission": {"HEADRACE_NO_WORKER_WAIT_MS": "600000"},
        "gateway": {"HEADRACE_MAX_STREAMS": most, "HEADRACE_MAX_STREAMS_PER_KEY": most},
    }
    with tempfile.TemporaryDirectory(prefix="headrace-models-") as folder:
        spec = dataclasses.replace(simulated_model(), id=_UNSERVED)
        model = Path(folder) / _UNSERVED / "model.json"
        model.parent.mkdir()
        model.write_text(json.dumps(dataclasses.asdict(spec)))
        async with bench_stack(
            report,
            models_dir=Path(folder),
            models=(SIMULATED_MODEL, _UNSERVED),
            runner="simulated",
            step_ms=options.step_ms,
            settings=settings,
        ) as bench:
            return await _measure(bench, options, report)


async def _measure(
    bench: BenchStack, options: argparse.Namespace, report: Callable[[str], None]
) -> dict[str, Any]:
    sessions = bench.sessions()
    await _probe(bench, 2)
    alone = await _probe(bench, options.probes)
    memory, files = _resident_kib(sessions[_GATEWAY]), _open_files(sessions[_GATEWAY])
    report(f"{options.streams} streams are begun")
    began, cpu = time.perf_counter(), cpu_seconds(sessions)
    waiting = await _begin(bench, options.streams)
    begin_s = time.perf_counter() - began
    begin_cpu = cpu_seconds(sessions)[_GATEWAY] - cpu[_GATEWAY]
    report(f"they wait for {options.seconds:g} s")
    cpu, began = cpu_seconds(sessions), time.perf_counter()
    await asyncio.sleep(options.seconds)
    elapsed, after = time.perf_counter() - began, cpu_seconds(sessions)
    grown, opened = _resident_kib(sessions[_GATEWAY]) - memory, _open_files(sessions[_GATEWAY]) - files
    beside = await _probe(bench, options.probes)
    lost = sum(each.lost for each in waiting)
    if lost:
        raise RuntimeError(f"{lost} of {len(waiting)} streams were lost")
    report("all are closed")
    began, cpu_closed = time.perf_counter(), cpu_seconds(sessions)
    for each in waiting:
        each.transport.abort()
    await _none_open(bench)
    closed_s = time.perf_counter() - began
    close_cpu = cpu_seconds(sessions)[_GATEWAY] - cpu_closed[_GATEWAY]
    share = {name: (after[name] - cpu[name]) / elapsed for name in sessions}
    return {
        "streams": options.streams,
        "kib_per_stream": round(grown / options.streams, 1),
        "open_files": opened,
        "cpu_share": {name: round(used, 3) for name, used in share.items()},
        "gateway_us_per_stream_and_s": round(share[_GATEWAY] / options.streams * 1e6, 1),
        "gateway_begin_ms_per_stream": round(begin_cpu / options.streams * 1e3, 3),
        "gateway_close_ms_per_stream": round(close_cpu / options.streams * 1e3, 3),
        "begin_s": round(begin_s, 1),
        "all_closed_s": round(closed_s, 2),
        "ttft_ms_p50": {"alone": percentile(alone, 0.5), "beside": percentile(beside, 0.5)},
        "ttft_ms_max": {"alone": max(alone), "beside": max(beside)},
    }


async def _begin(bench: BenchStack, count: int) -> list[_Waiting]:
    at = urlsplit(bench.stack.url())
    body = json.dumps({"model": _UNSERVED, "prompt": "wait", "max_tokens": 16, "stream": True})
    request = (
        f"POST /v1/generate HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {bench.api_key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    loop, host, port = asyncio.get_running_loop(), at.hostname or "127.0.0.1", at.port or 80
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def connect() -> _Waiting:
        async with gate:
            _, waiting = await loop.create_connection(lambda: _Waiting(request), host, port)
        return waiting

    async with asyncio.timeout(_TIMEOUT_S):
        waiting = await asyncio.gather(*(connect() for _ in range(count)))
        for each in waiting:
            if (first := await each.begun) != b"HTTP/1.1 200 OK":
                raise RuntimeError(f"a stream was not begun: {first.decode('latin-1')}")
    return waiting


async def _probe(bench: BenchStack, count: int) -> Sequence[float]:
    """TTFT in ms of `count` streams, one after another."""
    found = []
    for number in range(count):
        body: dict[str, object] = {"model": SIMULATED_MODEL, "prompt": f"{number} is new", "max_tokens": 2}
        times = await stream(bench.stack.url(), bench.api_key, body, NATIVE)
        found.append(round(times.ttft_ms, 1))
    return found


async def _none_open(bench: BenchStack) -> None:
    async with asyncio.timeout(_TIMEOUT_S), httpx.AsyncClient(base_url=bench.stack.url()) as client:
        while True:
            found = _OPEN.search((await client.get("/metrics")).text)
            if found and float(found[1]) == 0:
                return
            await asyncio.sleep(0.05)


def _resident_kib(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
