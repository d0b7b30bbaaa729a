"""The gateway when Kafka goes away and comes back, and when its slot is taken."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import httpx
import pytest

from gateway.config import GatewayConfig
from gateway.service import Gateway, KafkaUnavailableError, SupersededError
from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas.api_keys import new_key
from schemas.records import InferenceRequest, Tenant
from schemas.topics import Layout
from tests.fleet_driver import FleetDriver, serve, silent, until

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
KEY, _API_KEY = new_key(0)
HEADERS = {"x-api-key": KEY}
BODY = {"model": "simulated", "prompt": "Hi", "max_tokens": 6}


def config(bootstrap_servers: str) -> GatewayConfig:
    return GatewayConfig(
        kafka=bootstrap_servers,
        shards=LAYOUT.shards,
        worker_slots=LAYOUT.worker_slots,
        gateway_slots=LAYOUT.gateway_slots,
        models_dir=Path("no-models"),
        models="simulated",
        ack_timeout_s=0.5,
        start_timeout_s=20.0,
    )


@asynccontextmanager
async def running(
    broker: Broker, driver: FleetDriver
) -> AsyncIterator[tuple[Gateway, asyncio.Task[None], httpx.AsyncClient]]:
    """A ready gateway with the tenant in place; its task may be done at the end."""
    await driver.start()
    await driver.put_tenant("acme", Tenant("acme", 0, [_API_KEY], []))
    gateway, stop = Gateway(config(broker.bootstrap_servers)), asyncio.Event()
    task = asyncio.create_task(gateway.run(stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30) as client:
        await until(lambda: not gateway.serving.not_ready(time.monotonic()))
        yield gateway, task, client
    stop.set()
    await asyncio.wait([task], timeout=30)
    assert task.done()
    await driver.stop()


@pytest.fixture
async def broker(own_broker: Broker) -> AsyncIterator[Broker]:
    await create_topics(own_broker.bootstrap_servers, LAYOUT)
    yield own_broker
    await own_broker.stop()


async def test_a_broker_that_goes_and_comes_back(broker: Broker) -> None:
    driver = FleetDriver(broker.bootstrap_servers, LAYOUT)
    held = asyncio.Event()

    async def hold(driver: FleetDriver, request: InferenceRequest) -> None:
        if held.is_set():
            await serve(driver, request)
            return
        await driver.dispatch(request)
        await driver.tokens(request, 0, [72])
        await held.wait()
        await driver.tokens(request, 1, [105], "length")
        await driver.complete(request, 2, "length")

    driver.script = hold
    async with running(broker, driver) as (gateway, task, client):
        stream = asyncio.create_task(
            client.post("/v1/generate", json={**BODY, "stream": True}, headers=HEADERS)
        )
        first = await driver.next_request()
        await until(lambda: bool(gateway.serving.owner.open[first.request_id].state.token_ids))
        broker.kill()
        refused = await client.post("/v1/generate", json=BODY, headers=HEADERS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        assert refused.headers["retry-after"]
        await until(lambda: bool(gateway.serving.not_ready(time.monotonic())))
        await until(lambda: gateway.serving.broker_is_away)
        # By now it is known to be away: none waits for an ack any more, and none may arrive later.
        with mock.patch.object(gateway.serving.outbox, "send_request", side_effect=AssertionError):
            refused = await client.post("/v1/generate", json=BODY, headers=HEADERS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
            assert refused.headers["retry-after"]
            responses = {"model": BODY["model"], "input": "hi"}
            refused = await client.post("/v1/responses", json=responses, headers=HEADERS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        assert (await client.get("/health/live")).status_code == 200
        assert "heartbeats" in (await client.get("/health/ready")).text
        assert not stream.done()
        await broker.start()
        held.set()
        # The stalled broker aged nobody: the stream goes on as if nothing had been.
        answer = await asyncio.wait_for(stream, 20)
        assert '"output_tokens":2' in answer.text
        await until(lambda: not gateway.serving.not_ready(time.monotonic()))
        after = await client.post("/v1/generate", json=BODY, headers=HEADERS)
        assert (after.status_code, after.json()["text"]) == (200, "HiHiHi")
        # What was refused arrived after all, and its cancel behind it.
        cancelled = await driver.next_cancellation()
        assert cancelled.reason == "broker_unavailable"
        assert not task.done()


async def test_a_gateway_whose_slot_was_taken_ends_itself(broker: Broker) -> None:
    driver = FleetDriver(broker.bootstrap_servers, LAYOUT)
    driver.script = silent
    async with running(broker, driver) as (gateway, task, client):
        waiting = asyncio.create_task(client.post("/v1/generate", json=BODY, headers=HEADERS))
        await driver.next_request()
        second, stop = Gateway(config(broker.bootstrap_servers)), asyncio.Event()
        second_task = asyncio.create_task(second.run(stop))
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_lost")
        with pytest.raises(SupersededError):
            await asyncio.wait_for(task, 20)
        await until(lambda: second.serving.joined)
        assert second.serving.owner.epoch > gateway.serving.owner.epoch
        assert driver.cancellations.empty()
        stop.set()
        await asyncio.wait_for(second_task, 20)


async def test_it_may_be_started_before_kafka(broker: Broker) -> None:
    bootstrap_servers = broker.bootstrap_servers
    await broker.stop()
    gateway, stop = Gateway(config(bootstrap_servers)), asyncio.Event()
    task = asyncio.create_task(gateway.run(stop))
    await asyncio.sleep(1)
    assert not gateway.serving.joined
    await broker.start()
    assert broker.bootstrap_servers == bootstrap_servers
    await until(lambda: gateway.serving.joined)
    stop.set()
    await asyncio.wait_for(task, 20)


async def test_it_can_be_stopped_while_it_waits_for_kafka() -> None:
    gateway, stop = Gateway(GatewayConfig(kafka="127.0.0.1:1", models="simulated")), asyncio.Event()
    task = asyncio.create_task(gateway.run(stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client:
        refused = await client.post("/v1/generate", json=BODY, headers=HEADERS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
    stop.set()
    await asyncio.wait_for(task, 10)


async def test_without_kafka_it_ends_with_a_clear_message() -> None:
    settings = GatewayConfig(kafka="127.0.0.1:1", models="simulated", start_timeout_s=1.0)
    gateway = Gateway(settings)
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1.*Is it running"):
        await asyncio.wait_for(gateway.run(asyncio.Event()), 30)
