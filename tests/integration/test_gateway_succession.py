"""Gateways that are killed, stopped and drained while their streams run: processes of their own, real topics.

Admission and the worker are scripted. No stream loses or doubles a byte, no request is left without an end.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.local.broker import Broker
from schemas.api_keys import new_key
from schemas.priority import PriorityClass
from schemas.records import Cancellation, InferenceRequest, Tenant
from schemas.topics import Layout
from tests.fleet_driver import FleetDriver, until
from tests.own_broker import own_broker
from tests.service_process import ServiceProcess

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=3)
KEY, _API_KEY = new_key(0)
HEADERS = {"authorization": f"Bearer {KEY}"}
TEXT = "Grüße, 漢字 und 🙂. " * 3
TOKENS = list(TEXT.encode())
# Shedding lets it have fewer.
BODY = {"model": "simulated", "prompt": "hi", "max_tokens": 2 * len(TOKENS), "stream": True}
SUCCESSION_S = 2.0
Start = Callable[[int], ServiceProcess]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("succession-broker"), LAYOUT) as broker:
        yield broker


class Worker:
    """A script that goes on where the request stands and tells tokens as far as it is let."""

    def __init__(self) -> None:
        self.allowed = 9
        self.gone: set[int] = set()  # runs that died

    async def __call__(self, driver: FleetDriver, request: InferenceRequest) -> None:
        epoch = driver.worker_epoch
        capped = len(TOKENS) if request.sampling.max_tokens > len(TOKENS) else None
        await driver.dispatch(request, max_tokens=capped)
        for at in range(len(request.output_token_ids), len(TOKENS)):
            while at >= self.allowed:
                await asyncio.sleep(0.02)
                await self._sign(driver, request, at, epoch)
            if epoch in self.gone:
                return
            await driver.tokens(request, at, [TOKENS[at]], "length" if at + 1 == len(TOKENS) else None)
        await driver.complete(request, len(TOKENS), "length")

    async def _sign(self, driver: FleetDriver, request: InferenceRequest, at: int, epoch: int) -> None:
        if epoch not in self.gone:
            await driver.tokens(request, at, [], epoch=epoch)

    async def die(self, driver: FleetDriver) -> None:
        """The run ends without a word, its parent says so, and the slot's next life joins."""
        self.gone.add(driver.worker_epoch)
        await driver.worker_left()
        await driver.join_worker()


class Fleet:
    def __init__(self, driver: FleetDriver, start: Start) -> None:
        self.driver = driver
        self.worker = Worker()
        self.start = start
        driver.script = self.worker

    async def gateway(self, slot: int) -> ServiceProcess:
        process = self.start(slot)
        await asyncio.to_thread(process.wait_ready)
        return process

    async def no_cancellation(self) -> None:
        await self.driver.caught_up()
        assert self.driver.cancellations.empty()
        assert self.driver.queue_cancellations.empty()


@pytest.fixture
async def fleet(broker: Broker, tmp_path: Path) -> AsyncIterator[Fleet]:
    driver = FleetDriver(broker.bootstrap_servers, LAYOUT)
    await driver.start()
    await driver.put_tenant("acme", Tenant("acme", PriorityClass.INTERACTIVE, [_API_KEY], []))
    started: list[ServiceProcess] = []

    def start(slot: int) -> ServiceProcess:
        settings = {
            "MODELS_DIR": "no-models",
            "MODELS": "simulated",
            "STREAM_SECRET": "for all",
            "SUCCESSION_S": str(SUCCESSION_S),
            "CANCEL_TIMEOUT_MS": "2000",
            "DRAIN_S": "0.5",
        }
        prefixed = {f"HEADRACE_{name}": value for name, value in settings.items()}
        process = ServiceProcess(
            ["gateway"], "gateway", broker.bootstrap_servers, LAYOUT, slot, tmp_path, prefixed
        )
        started.append(process)
        return process

    yield Fleet(driver, start)
    for process in started:
        process.kill()
    await driver.stop()


def url(process: ServiceProcess, path: str) -> str:
    return f"http://127.0.0.1:{process.port}{path}"


def taken_over(by: ServiceProcess, request: InferenceRequest) -> bool:
    lines = by.log_file.read_text().splitlines()
    return any("taking over a request" in line and request.request_id.hex() in line for line in lines)


class Reading:
    """A client that reads events until the stream or its connection ends."""

    def __init__(self, method: str, where: str, after: int = -1, detach: str = "0") -> None:
        self.stream, self.text, self.position, self.last = "", "", after, ""
        self._headers = {**HEADERS, "x-headrace-detach": detach}
        if after >= 0:
            self._headers["last-event-id"] = str(after)
        self.task = asyncio.create_task(self._read(method, where))

    async def _read(self, method: str, where: str) -> None:
        body = BODY if method == "POST" else None
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream(method, where, json=body, headers=self._headers) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            self.stream = answer.headers.get("x-headrace-stream", "")
            position = -1
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    position = int(line.removeprefix("id: "))
                elif line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    self.text += data.get("text", "")
                    self.position, self.last = max(self.position, position), data["type"]

    async def until(self, position: int) -> None:
        async with asyncio.timeout(20):
            while self.position < position:
                assert not self.task.done()
                await asyncio.sleep(0.02)

    async def ended(self) -> str:
        """The text, once it came to a good end."""
        await asyncio.wait_for(self.task, 30)
        assert self.last == "done"
        return self.text

    async def broken(self) -> str:
        with pytest.raises(httpx.TransportError):
            await asyncio.wait_for(self.task, 20)
        return self.text

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def read_half(process: ServiceProcess, detach: str = "0") -> AsyncIterator[Reading]:
    reading = Reading("POST", url(process, "/v1/generate"), detach=detach)
    await reading.until(8)
    yield reading
    await reading.leave()


@pytest.mark.parametrize("worker_dies", [False, True])
async def test_a_stream_outlives_its_gateway_and_its_worker(fleet: Fleet, worker_dies: bool) -> None:
    owner, other = await asyncio.gather(fleet.gateway(0), fleet.gateway(1))
    async with read_half(owner) as first:
        owner.kill()
        seen = await first.broken()
        if worker_dies:
            await fleet.worker.die(fleet.driver)
        back = Reading("GET", url(other, f"/v1/streams/{first.stream}"), after=8)
        request = await fleet.driver.next_request()
        if worker_dies:
            again = await fleet.driver.next_request()
            assert (again.attempt, again.request_id) == (2, request.request_id)
            assert again.output_token_ids == TOKENS[:9]
            assert again.owner_epoch != request.owner_epoch
            assert (request.sampling.max_tokens, again.sampling.max_tokens) == (2 * len(TOKENS), len(TOKENS))
        fleet.worker.allowed = len(TOKENS)
        assert seen + await back.ended() == TEXT
    if not worker_dies:
        await fleet.no_cancellation()
    assert fleet.driver.requests.empty()


@pytest.mark.parametrize("worker_dies", [False, True])
async def test_what_nobody_comes_back_to_ends_and_is_billed(fleet: Fleet, worker_dies: bool) -> None:
    owner, _ = await asyncio.gather(fleet.gateway(0), fleet.gateway(1))
    async with read_half(owner) as first:
        owner.kill()
        await first.broken()
    if worker_dies:
        await fleet.worker.die(fleet.driver)
        usage = await fleet.driver.next_usage()
        assert (usage.sealed, usage.finish_reason) == (True, "cancelled")
        assert (usage.output_tokens, usage.tenant, usage.attempt) == (9, "acme", 1)
    cancellation = await fleet.driver.next_cancellation()
    request = await fleet.driver.next_request()
    assert (cancellation.request_id, cancellation.attempt) == (request.request_id, 1)
    assert fleet.driver.requests.empty()
    if not worker_dies:
        await fleet.driver.complete(request, 9, "cancelled")


async def test_the_next_life_of_a_slot_goes_on_with_what_has_time_and_ends_the_rest(fleet: Fleet) -> None:
    owner = await fleet.gateway(0)
    async with read_half(owner, detach="60") as first, read_half(owner) as second:
        kept, dropped = [await fleet.driver.next_request() for _ in range(2)]
        owner.kill()
        await first.broken()
        await second.broken()
    owner = await fleet.gateway(0)
    cancellation: Cancellation = await fleet.driver.next_cancellation()
    assert cancellation.request_id == dropped.request_id
    fleet.worker.gone.add(fleet.driver.worker_epoch)
    await fleet.driver.complete(dropped, 9, "cancelled")
    fleet.worker.gone.clear()
    fleet.worker.allowed = len(TOKENS)
    back = Reading("GET", url(owner, f"/v1/streams/{first.stream}"))
    assert await back.ended() == TEXT
    await fleet.no_cancellation()
    assert kept.attempt == 1


async def test_a_gateway_that_was_stopped_harms_nothing_when_it_wakes(fleet: Fleet) -> None:
    owner, other = await asyncio.gather(fleet.gateway(0), fleet.gateway(1))
    async with read_half(owner) as first:
        back = Reading("GET", url(other, f"/v1/streams/{first.stream}"))
        leaver = Reading("POST", url(owner, "/v1/generate"))
        await leaver.until(8)
        await back.until(8)
        os.kill(owner.process.pid, signal.SIGSTOP)
        try:
            # When it wakes it sees that this client left before it sees that someone reads elsewhere.
            await leaver.leave()
            elsewhere = Reading("GET", url(other, f"/v1/streams/{leaver.stream}"))
            await elsewhere.until(8)
            await asyncio.sleep(5)
        finally:
            os.kill(owner.process.pid, signal.SIGCONT)
        await asyncio.sleep(1.5)
        await fleet.no_cancellation()
        fleet.worker.allowed = len(TOKENS)
        assert [await r.ended() for r in (first, back, elsewhere)] == [TEXT] * 3
    await fleet.no_cancellation()
    requests = [await fleet.driver.next_request() for _ in range(2)]
    assert ([r.attempt for r in requests], fleet.driver.requests.empty()) == ([1, 1], True)
    assert all(taken_over(other, request) for request in requests)


async def test_a_drained_gateway_leaves_what_is_read_elsewhere_to_others(fleet: Fleet) -> None:
    owner, other = await asyncio.gather(fleet.gateway(0), fleet.gateway(1))
    async with read_half(owner) as first:
        back = Reading("GET", url(other, f"/v1/streams/{first.stream}"))
        await back.until(8)
        assert await asyncio.to_thread(owner.stop) == 0
        await asyncio.wait_for(first.task, 10)
        assert first.last == "error"
        request = await fleet.driver.next_request()
        await until(lambda: taken_over(other, request))
        await fleet.no_cancellation()
        fleet.worker.allowed = len(TOKENS)
        assert await back.ended() == TEXT


async def test_a_background_response_that_nobody_reads_outlives_its_gateway_and_its_worker(
    fleet: Fleet,
) -> None:
    owner, other = await asyncio.gather(fleet.gateway(0), fleet.gateway(1))
    body = {"model": "simulated", "input": "hi", "max_output_tokens": len(TOKENS), "background": True}
    async with httpx.AsyncClient(headers=HEADERS, timeout=30) as client:
        created = (await client.post(url(owner, "/v1/responses"), json=body)).json()

        async def response_with(status: str, text: str) -> dict[str, Any]:
            async with asyncio.timeout(20):
                while True:
                    answer = await client.get(url(other, f"/v1/responses/{created['id']}"))
                    found: dict[str, Any] = answer.json()
                    shown = "".join(item["content"][0]["text"] for item in found["output"])
                    if (found["status"], shown) == (status, text):
                        return found
                    await asyncio.sleep(0.1)

        await response_with("in_progress", bytes(TOKENS[:9]).decode())
        owner.kill()
        await fleet.worker.die(fleet.driver)
        first, again = [await fleet.driver.next_request() for _ in range(2)]
        assert (again.request_id, again.attempt) == (first.request_id, 2)
        fleet.worker.allowed = len(TOKENS)
        done = await response_with("incomplete", TEXT)
    assert done["created_at"] == created["created_at"]
    assert done["usage"]["output_tokens"] == len(TOKENS)
