"""Faults done to a running stack under load, and what the streams that ran then were shown.

Every stream's text is compared with what the simulated model gives for its request, token by token, so none
can be lost, doubled or out of place unseen; and the bill with the tokens.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.benchmarks.figures import percentile
from infra.benchmarks.hops import LogReader
from infra.benchmarks.returning_client import Delivery, deliver
from infra.local.stack import BROKER, Stack
from schemas import topics
from schemas.catalog import SIMULATED_MODEL
from schemas.records import Claim, Completion, Failed, Retry, Usage
from schemas.usage_rank import usage_rank
from workers.simulated_runner import SimulatedRunner

_STARTED_S = 30.0
_BILLED_S = 30.0
_LOOK_S = 0.05
Fault = Callable[[Stack], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at the first gateway, with so many output tokens each."""

    streams: int
    tokens: int


async def worker_process(stack: Stack) -> None:
    """kill -9 of a worker, not of its parent, which says Left."""
    os.kill(_only_child(stack.child("worker-0").pid), signal.SIGKILL)


async def worker_host(stack: Stack) -> None:
    """kill -9 of a worker and its parent: only its silence tells."""
    stack.kill("worker-0")


async def worker_drain(stack: Stack) -> None:
    """SIGTERM of a worker."""
    os.kill(stack.child("worker-0").pid, signal.SIGTERM)


async def gateway_killed(stack: Stack) -> None:
    """kill -9 of the gateway that all clients are at."""
    stack.kill("gateway-0")


async def gateway_drain(stack: Stack) -> None:
    """SIGTERM of the gateway that all clients are at."""
    os.kill(stack.child("gateway-0").pid, signal.SIGTERM)


async def gateway_and_worker(stack: Stack) -> None:
    """kill -9 of the clients' gateway and of a worker with its parent at once."""
    stack.kill("gateway-0")
    stack.kill("worker-0")


def stopped(name: str, seconds: float) -> Fault:
    """SIGSTOP of a process and its children, SIGCONT after `seconds`."""

    async def fault(stack: Stack) -> None:
        group = stack.child(name).pid
        os.killpg(group, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.killpg(group, signal.SIGCONT)

    return fault


broker_stalled = stopped(BROKER, 3.0)


async def inflict(
    stack: Stack,
    api_key: str,
    fault: Fault,
    load: Load,
    *,
    gateways: Sequence[str] = ("gateway-0", "gateway-1"),
) -> dict[str, Any]:
    """Starts the load, does `fault` when all streams run, and waits for their ends and rows.

    Gaps are the largest between two events of a stream after the fault began, in ms; `affected` are the
    streams that were retried or came back to another gateway, all if none did. Raises RuntimeError for a
    stream with an error or wrong text, a wrong row of the bill, or a request that has failed.
    """
    log = LogReader(stack.bootstrap_servers, stack.config.layout, (topics.TOKENS, topics.USAGE))
    await log.mark()
    deliveries = [Delivery() for _ in range(load.streams)]
    urls = [stack.url(name) for name in gateways]
    body: dict[str, object] = {
        "model": SIMULATED_MODEL,
        "prompt": "hi",
        "max_tokens": load.tokens,
        "ignore_eos": True,
    }
    async with asyncio.TaskGroup() as running:
        for delivery in deliveries:
            running.create_task(deliver(urls, api_key, body, delivery))
        async with asyncio.timeout(_STARTED_S):
            while not all(len(delivery.at) > 1 for delivery in deliveries):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(_LOOK_S)
        began = time.perf_counter()
        await fault(stack)
        over = time.perf_counter()
    _check(deliveries, load.tokens)
    async with asyncio.timeout(_BILLED_S):
        while True:
            records = [record for record, _ in await log.read()]
            if _all_ended(records, deliveries):
                break
            await asyncio.sleep(_LOOK_S)
    return _figures(deliveries, records, began, over, load)


def _check(deliveries: Sequence[Delivery], tokens: int) -> None:
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)  # printable bytes, as workers have it
    for delivery in deliveries:
        if delivery.error is not None:
            raise RuntimeError(f"a stream failed: {delivery.error}")
        expected = [chr(runner.token_at(delivery.request_id, i)) for i in range(tokens)]
        if "".join(delivery.text) != "".join(expected):
            raise RuntimeError(f"the stream of {delivery.request_id.hex()} was shown wrong tokens")


def _all_ended(records: Sequence[object], deliveries: Sequence[Delivery]) -> bool:
    ended = {r.request_id for r in records if isinstance(r, Completion | Failed)}
    billed = {r.request_id for r in records if isinstance(r, Usage)}
    return {d.request_id for d in deliveries} <= ended & billed


def _figures(
    deliveries: Sequence[Delivery], records: Sequence[object], began: float, over: float, load: Load
) -> dict[str, Any]:
    ours = {delivery.request_id for delivery in deliveries}
    if failed := [r for r in records if isinstance(r, Failed)]:
        raise RuntimeError(f"a request failed: {failed[0]}")
    retried = [r.request_id for r in records if isinstance(r, Retry)]
    rows: dict[bytes, Usage] = {}
    for row in records:
        if isinstance(row, Usage) and row.request_id in ours:
            best = rows.get(row.request_id)
            if best is None or usage_rank(row) > usage_rank(best):
                rows[row.request_id] = row
    wrong = [r for r in rows.values() if r.output_tokens != load.tokens]
    if wrong:
        raise RuntimeError(f"billed {wrong[0].output_tokens} tokens instead of {load.tokens}: {wrong[0]}")
    affected = [d for d in deliveries if d.away_ms or d.request_id in retried] or deliveries
    gaps = [delivery.largest_gap_ms(began) for delivery in affected]
    after = [next((at for at in d.at if at > over), over) - over for d in deliveries]
    away = [ms for delivery in deliveries for ms in delivery.away_ms]
    return {
        "streams": load.streams,
        "affected": len(affected),
        "gap_ms_p50": round(percentile(gaps, 0.5), 1),
        "gap_ms_max": round(max(gaps), 1),
        "first_after_ms_max": round(max(after) * 1000, 1),
        "away_ms_max": round(max(away, default=0.0), 1),
        "retries": len(retried),
        "claims": sum(isinstance(r, Claim) for r in records),
    }


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if len(children) != 1:
        raise RuntimeError(f"process {pid} has children {children}")
    return int(children[0])
