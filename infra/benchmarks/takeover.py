"""Admission processes that die, leave and join: for how long new requests of a partition wait, at most.

On a real broker, with a played worker and a tenant in each shard, who asks every 20 ms. Per event, the
longest time in which no request of some tenant was dispatched (s). There are no owners here who send again or
restate.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from infra.benchmarks.admission import admission_child
from infra.benchmarks.admission_fleet import BenchFleet, tenant_name
from infra.benchmarks.machine import cpu_times, wait_for_calm
from infra.local.broker import Broker
from infra.local.child import Child
from infra.topics.create import create_topics
from schemas.priority import PriorityClass
from schemas.topics import Layout, partition, tenant_partition
from streams.assignment import spread

_LAYOUT = Layout(shards=4, worker_slots=1, gateway_slots=1)
_PROBE_S = 0.02
_QUIET_S = 2.0
_TIMEOUT_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--calm", type=float, default=60.0, help="seconds to wait for others to be quiet")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    names = [f"admission-{slot}" for slot in range(options.processes)]
    mine = spread(range(3 * _LAYOUT.shards), names)
    # One that has a partition that is asked for.
    victim = next(slot for slot, name in enumerate(names) if any(number % 3 == 0 for number in mine[name]))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        broker = Broker(Path(folder), report=report)
        await broker.start()
        children = []
        try:
            await create_topics(broker.bootstrap_servers, _LAYOUT)
            fleet = BenchFleet(broker.bootstrap_servers, _LAYOUT)
            async with fleet.running():
                probes = _Probes(fleet)
                await fleet.put_tenants(list(probes.tenants))
                children = [
                    admission_child(broker.bootstrap_servers, Path(folder), _LAYOUT, slot)
                    for slot in range(options.processes)
                ]
                await asyncio.gather(*(child.start() for child in children))
                asking = asyncio.create_task(probes.ask())
                try:
                    return await _measure(probes, children[victim], options.calm, report)
                finally:
                    asking.cancel()
                    await asyncio.wait([asking])
        finally:
            for child in children:
                child.kill()
            await broker.stop()


async def _measure(
    probes: "_Probes", child: Child, calm_s: float, report: Callable[[str], None]
) -> dict[str, Any]:
    async def kill() -> None:
        child.kill()

    async def kill_and_restart() -> None:
        child.kill()
        await child.start()

    await wait_for_calm(calm_s, report)
    figures: dict[str, Any] = {}
    before = cpu_times()
    await probes.until_quiet()
    events: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("killed", kill),
        ("joined", child.start),
        ("left", child.stop),
        ("joined_again", child.start),
        ("killed_and_restarted", kill_and_restart),
    ]
    for name, event in events:
        began = time.perf_counter()
        await event()
        await probes.until_quiet()
        figures[f"{name}_s"] = round(probes.longest_gap_since(began), 2)
        report(f"{name}: {figures[f'{name}_s']} s")
    return {**figures, "foreign_cpu_share": round(cpu_times().foreign_share_since(before), 3)}


class _Probes:
    """`tenants`: one of each shard."""

    def __init__(self, fleet: BenchFleet) -> None:
        self._fleet = fleet
        self.tenants = [_tenant_of(shard) for shard in range(_LAYOUT.shards)]
        self._asked: dict[int, list[bytes]] = {tenant: [] for tenant in self.tenants}

    async def ask(self) -> None:
        while True:
            for tenant, asked in self._asked.items():
                asked.append(await self._fleet.send(tenant, PriorityClass.INTERACTIVE))
            await asyncio.sleep(_PROBE_S)

    async def until_quiet(self) -> None:
        """Returns when nobody has waited for a while. Raises TimeoutError."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                await asyncio.sleep(_QUIET_S)
                if self.longest_gap_since(time.perf_counter() - _QUIET_S) < _QUIET_S / 4:
                    return

    def longest_gap_since(self, began: float) -> float:
        """Of any tenant (s), until now."""
        return max(self._gap(asked, began) for asked in self._asked.values())

    def _gap(self, asked: list[bytes], began: float) -> float:
        times = [began]
        for request_id in reversed(asked):
            with suppress(KeyError):
                times.append(self._fleet.dispatched_at[request_id])
        times = [*sorted(t for t in times if t >= began), time.perf_counter()]
        return max(later - earlier for earlier, later in pairwise(times))


def _tenant_of(shard: int) -> int:
    wanted = partition(shard, PriorityClass.INTERACTIVE)
    return next(
        n
        for n in count()
        if tenant_partition(tenant_name(n), PriorityClass.INTERACTIVE, _LAYOUT.shards) == wanted
    )
