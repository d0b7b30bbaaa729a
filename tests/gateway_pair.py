"""Two gateways on real topics with a scripted fleet behind them; slot 0 takes the requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.config import GatewayConfig
from gateway.service import Gateway
from infra.local.broker import Broker
from schemas.api_keys import new_key
from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, Tenant
from schemas.topics import Layout
from tests.fleet_driver import FleetDriver, serve, until

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
KEY, _API_KEY = new_key(0)
OTHER_KEY, _OTHER_API_KEY = new_key(0)
HEADERS = {"authorization": f"Bearer {KEY}"}
OTHER_HEADERS = {"authorization": f"Bearer {OTHER_KEY}"}


@dataclass
class GatewayPair:
    """`owner` and `other` are clients of the gateways in slots 0 and 1. Keys of two tenants: HEADERS,
    OTHER_HEADERS."""

    gateways: list[Gateway]
    driver: FleetDriver
    owner: httpx.AsyncClient
    other: httpx.AsyncClient

    async def nothing_open(self) -> None:
        """Between tests: waits until nothing runs, and forgets what the driver saw."""
        self.driver.script = serve
        for gateway in self.gateways:
            serving = gateway.serving
            await until(lambda serving=serving: not serving.owner.open and not len(serving.scans))  # type: ignore[misc]
        await self.driver.caught_up()
        for queue in (
            self.driver.requests,
            self.driver.cancellations,
            self.driver.queue_cancellations,
            self.driver.usage,
        ):
            while not queue.empty():
                queue.get_nowait()


@asynccontextmanager
async def gateway_pair(broker: Broker) -> AsyncIterator[GatewayPair]:
    driver = FleetDriver(broker.bootstrap_servers, LAYOUT)
    await driver.start()
    await driver.put_tenant("acme", Tenant("acme", PriorityClass.INTERACTIVE, [_API_KEY], []))
    await driver.put_tenant("other", Tenant("other", PriorityClass.INTERACTIVE, [_OTHER_API_KEY], []))
    gateways = [Gateway(_config(broker, slot)) for slot in range(2)]
    stop = asyncio.Event()
    running = [asyncio.create_task(gateway.run(stop)) for gateway in gateways]
    clients = [httpx.AsyncClient(base_url=f"http://127.0.0.1:{g.port}", timeout=20) for g in gateways]
    await until(lambda: all(g.serving.joined for g in gateways))
    yield GatewayPair(gateways, driver, *clients)
    for client in clients:
        await client.aclose()
    stop.set()
    await asyncio.wait_for(asyncio.gather(*running), 20)
    await driver.stop()


def _config(broker: Broker, slot: int) -> GatewayConfig:
    return GatewayConfig(
        kafka=broker.bootstrap_servers,
        slot=slot,
        shards=LAYOUT.shards,
        worker_slots=LAYOUT.worker_slots,
        gateway_slots=LAYOUT.gateway_slots,
        models_dir=Path("no-models"),
        models="simulated",
        cancel_timeout_ms=1_000,
        drain_s=5.0,
        stream_secret="for both gateways",
        max_scans=3,
    )


class LedWorker:
    """A script that tells these tokens when it is let, one a record."""

    def __init__(self, token_ids: Sequence[int], allowed: int = 0) -> None:
        self._token_ids = token_ids
        self._allowed = allowed
        self._moved = asyncio.Event()

    def allow(self, count: int) -> None:
        self._allowed = count
        self._moved.set()

    async def __call__(self, driver: FleetDriver, request: InferenceRequest) -> None:
        count = len(self._token_ids)
        await driver.dispatch(request)
        for at, token_id in enumerate(self._token_ids):
            while at >= self._allowed:
                self._moved.clear()
                await self._moved.wait()
            await driver.tokens(request, at, [token_id], "length" if at + 1 == count else None)
        await driver.complete(request, count, "length")


async def held(driver: FleetDriver, request: InferenceRequest) -> None:
    """A script that tells "ab" and then waits for a cancel."""
    await driver.dispatch(request)
    await driver.tokens(request, 0, [97, 98])
    await driver.next_cancellation()
    await driver.complete(request, 2, "cancelled")
