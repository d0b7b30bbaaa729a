"""The gateway over real HTTP and real topics; admission and the worker are scripted."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from gateway.config import GatewayConfig
from gateway.service import Gateway
from infra.local.broker import Broker
from schemas.api_keys import new_key
from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, Tenant
from schemas.topics import Layout
from tests.fleet_driver import FleetDriver, serve, silent, until
from tests.own_broker import own_broker

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
KEY, _API_KEY = new_key(0)
FREE_KEY, _FREE_API_KEY = new_key(0)
HEADERS = {"authorization": f"Bearer {KEY}"}
BODY = {"model": "simulated", "prompt": "Hällo", "max_tokens": 6}
ANSWER = "Hällo"


class Api:
    """The gateway under test, its driver, and a client with a key."""

    def __init__(self, gateway: Gateway, driver: FleetDriver, client: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.driver = driver
        self.client = client

    async def generate(self, **changes: object) -> httpx.Response:
        return await self.client.post("/v1/generate", json={**BODY, **changes}, headers=HEADERS)


@pytest.fixture(scope="module")
def http_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("gateway-broker"), LAYOUT) as broker:
        yield broker


def config(broker: Broker, slot: int = 0) -> GatewayConfig:
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
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api_module(http_broker: Broker) -> AsyncIterator[Api]:
    driver = FleetDriver(http_broker.bootstrap_servers, LAYOUT)
    await driver.start()
    await driver.put_tenant("acme", Tenant("acme", PriorityClass.INTERACTIVE, [_API_KEY], []))
    await driver.put_tenant("cheap", Tenant("cheap", PriorityClass.FREE, [_FREE_API_KEY], []))
    gateway = Gateway(config(http_broker))
    stop = asyncio.Event()
    running = asyncio.create_task(gateway.run(stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=20) as client:
        await ready(client)
        yield Api(gateway, driver, client)
    stop.set()
    await asyncio.wait_for(running, 20)
    await driver.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def api(api_module: Api) -> AsyncIterator[Api]:
    """Between tests nothing is open, and what the driver saw is forgotten."""
    driver = api_module.driver
    driver.script = serve
    driver.heartbeating = {"admission": True, "worker": True}
    await until(lambda: not api_module.gateway.serving.not_ready(time.monotonic()))
    yield api_module
    owner = api_module.gateway.serving.owner
    await until(lambda: not owner.open and not api_module.gateway.serving.readers)
    await asyncio.wait_for(api_module.gateway.serving.outbox.drained(), 10)
    await driver.caught_up()
    for queue in (driver.requests, driver.cancellations, driver.queue_cancellations, driver.usage):
        while not queue.empty():
            queue.get_nowait()


async def ready(client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 20
    while (answer := await client.get("/health/ready")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.05)


def events(text: str) -> list[dict[str, object]]:
    return [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line[6] == "{"
    ]


async def test_a_stream_has_the_events_of_the_api(api: Api) -> None:
    response = await api.generate(stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    found = events(response.text)
    assert found[-1] == {
        "type": "done",
        "usage": {"input_tokens": 7, "cached_tokens": 0, "output_tokens": 6},
        "stop_reason": "length",
    }
    assert all(event["type"] == "token" for event in found[:-1])
    assert "".join(str(event["text"]) for event in found[:-1]) == ANSWER
    request = await api.driver.next_request()
    assert response.headers["x-request-id"] == request.request_id.hex()
    assert request.prompt_token_ids == [256, *"Hällo".encode()]
    assert (request.tenant, request.priority, request.attempt, request.model) == ("acme", 0, 1, "simulated")
    assert request.owner_epoch == api.gateway.serving.owner.epoch


async def test_a_whole_answer(api: Api) -> None:
    response = await api.generate()
    assert response.json() == {
        "id": response.headers["x-request-id"],
        "model": "simulated",
        "text": ANSWER,
        "usage": {"input_tokens": 7, "cached_tokens": 0, "output_tokens": 6},
        "stop_reason": "length",
    }


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_streams_as_openai_does(api: Api, include_usage: bool) -> None:
    body = {
        "model": "simulated",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": include_usage},
    }
    response = await api.client.post("/v1/chat/completions", json=body, headers={"x-api-key": KEY})
    assert response.text.endswith("\n\nid: 3\ndata: [DONE]\n\n")
    found = events(response.text)
    choices = [event["choices"][0] for event in found if event["choices"]]  # type: ignore[index]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "<|us"
    usages = [event.get("usage") for event in found]
    if include_usage:
        assert usages[:-1] == [None] * (len(found) - 1)
        assert usages[-1]["completion_tokens"] == 4  # type: ignore[index]
    else:
        assert all("usage" not in event for event in found)


async def test_the_official_client(api: Api) -> None:
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"http://127.0.0.1:{api.gateway.port}/v1", max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == ["simulated"]
        asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="simulated", messages=asked, max_tokens=5)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("<|use", "length")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        pieces, usage = [], None
        async for chunk in await client.chat.completions.create(
            model="simulated",
            messages=asked,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == "<|use"
        assert usage is not None
        assert usage.total_tokens == usage.prompt_tokens + 5
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.chat.completions.create(model="gpt-9", messages=asked)

        async def fail(driver: FleetDriver, request: InferenceRequest) -> None:
            await driver.tokens(request, 0, [65])
            await driver.complete(request, 1, "error", "the engine stumbled")

        api.driver.script = fail
        with pytest.raises(openai.APIError, match="the engine stumbled"):
            async for _ in await client.chat.completions.create(
                model="simulated", messages=asked, stream=True
            ):
                pass


async def test_admission_refuses_with_a_real_status(api: Api) -> None:
    async def refuse(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.reject(request, 429, "rate_limit_exceeded", 2_300)

    api.driver.script = refuse
    for stream in (True, False):
        response = await api.generate(stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert response.json()["error"]["type"] == "rate_limit_error"
    assert api.driver.usage.empty()


async def test_a_queued_stream_starts_at_dispatched(api: Api) -> None:
    dispatched = asyncio.Event()

    async def slow(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.admit(request)
        await asyncio.sleep(0.3)
        dispatched.set()
        await serve(driver, request)

    api.driver.script = slow
    async with api.client.stream(
        "POST", "/v1/generate", json={**BODY, "stream": True}, headers=HEADERS
    ) as response:
        assert dispatched.is_set()
        await response.aread()
    assert events(response.text)[-1]["type"] == "done"


async def test_a_disconnect_cancels_and_the_state_is_kept_to_the_end(api: Api) -> None:
    gone = asyncio.Event()

    async def endless(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        for i in range(500):
            await driver.tokens(request, i, [65])
            if gone.is_set():
                return
            await asyncio.sleep(0.005)

    api.driver.script = endless
    async with api.client.stream(
        "POST", "/v1/generate", json={**BODY, "max_tokens": 1000, "stream": True}, headers=HEADERS
    ) as response:
        await anext(response.aiter_lines())
    cancellation = await api.driver.next_cancellation()
    gone.set()
    request = await api.driver.next_request()
    assert cancellation.request_id == request.request_id
    assert (cancellation.reason, cancellation.slot) == ("disconnected", None)
    owned = api.gateway.serving.owner.open[request.request_id]
    await asyncio.sleep(0.1)
    await api.driver.complete(request, len(owned.state.token_ids), "cancelled")
    assert api.driver.queue_cancellations.empty()


async def test_a_disconnect_in_the_queue_also_tells_admission(api: Api) -> None:
    api.driver.script = silent
    waiting = asyncio.create_task(api.generate(stream=True))
    request = await api.driver.next_request()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await api.driver.next_cancellation()).request_id == request.request_id
    behind = await asyncio.wait_for(api.driver.queue_cancellations.get(), 5)
    assert behind.request_id == request.request_id
    await api.driver.reject(request, 499, "cancelled")
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.finish_reason, usage.input_tokens, usage.output_tokens) == (
        True,
        "cancelled",
        0,
        0,
    )


async def test_a_cancel_that_nobody_ends_is_ended_by_the_owner(api: Api) -> None:
    async def three_tokens(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [65, 66, 67])

    api.driver.script = three_tokens
    async with api.client.stream(
        "POST", "/v1/generate", json={**BODY, "stream": True}, headers=HEADERS
    ) as response:
        await anext(response.aiter_lines())
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.finish_reason, usage.input_tokens, usage.output_tokens) == (
        True,
        "cancelled",
        7,
        3,
    )


def shown(response: httpx.Response, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        return str(response.json()["text"])
    return "".join(str(each["text"]) for each in events(response.text) if each["type"] == "token")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_worker_is_not_seen_by_the_client(api: Api, stream: bool) -> None:
    async def die_once(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        if request.attempt == 1:
            await driver.tokens(request, 0, [65, 66])
            await driver.worker_left()
            await driver.join_worker()
            return
        told = request.output_token_ids
        await driver.tokens(request, len(told), [66 + len(told) - 1], "length")
        await driver.complete(request, len(told) + 1, "length")

    api.driver.script = die_once
    response = await api.generate(stream=stream, max_tokens=3)
    assert response.status_code == 200
    assert shown(response, stream) == "ABC"
    first, second = await api.driver.next_request(), await api.driver.next_request()
    assert (first.attempt, first.output_token_ids) == (1, [])
    assert (second.attempt, second.output_token_ids) == (2, [65, 66])
    assert (second.request_id, second.prompt_token_ids) == (first.request_id, first.prompt_token_ids)
    assert (second.accepted_at, second.sampling) == (first.accepted_at, first.sampling)
    cancellation = await api.driver.next_cancellation()
    assert (cancellation.attempt, cancellation.reason) == (1, "worker_lost")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_loses_four_workers_ends_with_an_error_and_a_sealed_bill(
    api: Api, stream: bool
) -> None:
    async def die(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, request.attempt - 1, [64 + request.attempt])
        await driver.worker_left()
        await driver.join_worker()

    api.driver.script = die
    response = await api.generate(stream=stream)
    if stream:
        assert response.status_code == 200
        last = events(response.text)[-1]
        assert last["type"] == "error"
        assert last["error"]["code"] == "worker_lost"  # type: ignore[index]
        assert shown(response, stream) == "ABCD"
    else:
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "worker_lost"
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.attempt, usage.output_tokens, usage.input_tokens) == (True, 4, 4, 7)
    assert usage.finish_reason == "error"
    assert usage.ended_at >= usage.accepted_at
    assert usage.request_id.hex() == response.headers["x-request-id"]


async def test_a_chat_stream_that_fails_has_no_done_marker(api: Api) -> None:
    async def fail(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [65])
        await driver.complete(request, 1, "error", "the engine stumbled")

    api.driver.script = fail
    body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    response = await api.client.post("/v1/chat/completions", json=body, headers=HEADERS)
    assert "[DONE]" not in response.text
    error = events(response.text)[-1]["error"]
    assert error == {
        "message": "the engine stumbled",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert (await api.driver.next_usage()).sealed


async def test_a_silent_worker_is_lost(api: Api) -> None:
    async def fall_silent(driver: FleetDriver, request: InferenceRequest) -> None:
        if request.attempt == 1:
            await driver.dispatch(request)
            driver.heartbeating["worker"] = False
            return
        await driver.join_worker()
        driver.heartbeating["worker"] = True
        await serve(driver, request)

    api.driver.script = fall_silent
    response = await api.generate()
    assert response.json()["text"] == ANSWER
    assert (await api.driver.next_cancellation()).reason == "worker_lost"


async def test_a_gap_is_filled_by_another_attempt(api: Api) -> None:
    async def skip(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        if request.attempt == 1:
            await driver.tokens(request, 0, [65])
            await driver.tokens(request, 2, [67])
            return
        await driver.tokens(request, 1, [66, 67], "length")
        await driver.complete(request, 3, "length")

    api.driver.script = skip
    response = await api.generate(max_tokens=3)
    assert response.json()["text"] == "ABC"
    assert (await api.driver.next_cancellation()).reason == "output_gap"


async def test_a_stray_run_is_cancelled_by_run_and_the_bill_sealed(api: Api) -> None:
    async def two_runs(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [66], epoch=driver.worker_epoch + 1_000_000)
        await driver.tokens(request, 0, [65], "length")
        await driver.complete(request, 1, "length")

    api.driver.script = two_runs
    response = await api.generate(max_tokens=1)
    assert response.json()["text"] == "A"
    cancellation = await api.driver.next_cancellation()
    assert (cancellation.slot, cancellation.epoch) == (0, api.driver.worker_epoch + 1_000_000)
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.output_tokens, usage.finish_reason) == (True, 1, "length")


async def test_what_a_takeover_skipped_is_sent_again(api: Api) -> None:
    driver = api.driver

    async def lose_first(driver: FleetDriver, request: InferenceRequest) -> None:
        if driver.requests.qsize() > 1:
            await serve(driver, request)
            return
        offset = driver.offsets[request.request_id, 1]
        for partition in driver.takeover_offsets:
            driver.takeover_offsets[partition] = max(driver.takeover_offsets[partition], offset + 1)

    before = dict(driver.takeover_offsets)
    driver.script = lose_first
    response = await api.generate()
    assert response.json()["text"] == ANSWER
    first, second = await driver.next_request(), await driver.next_request()
    assert (first.request_id, first.attempt) == (second.request_id, second.attempt)
    assert first.prompt_token_ids == second.prompt_token_ids
    driver.takeover_offsets = before


async def test_four_sends_without_an_answer_are_a_503(api: Api) -> None:
    api.driver.script = silent
    response = await api.generate()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_answer")
    assert response.headers["retry-after"]
    assert api.driver.requests.qsize() == 4
    assert (await api.driver.next_usage()).input_tokens == 0


async def test_classes(api: Api) -> None:
    headers = {"x-api-key": FREE_KEY}
    body = {**BODY, "priority": "interactive"}
    response = await api.client.post("/v1/generate", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (403, "priority")
    assert (await api.client.post("/v1/generate", json=BODY, headers=headers)).status_code == 200
    assert (await api.driver.next_request()).priority == PriorityClass.FREE
    response = await api.generate(priority="batch")
    assert response.status_code == 200
    request = await api.driver.next_request()
    # The class-2 partitions are the coordinators'.
    assert (request.priority, request.reply_partition) == (PriorityClass.BATCH, 1)


async def test_a_deleted_key_is_refused(api: Api) -> None:
    key, api_key = new_key(0)
    headers = {"x-api-key": key}
    await api.driver.put_tenant("brief", Tenant("brief", 0, [api_key], []))

    async def until_status(status: int) -> None:
        deadline = time.monotonic() + 5
        while (await api.client.get("/v1/models", headers=headers)).status_code != status:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    await until_status(200)
    await api.driver.put_tenant("brief", None)
    await until_status(401)


async def test_metrics_tell_what_happened(api: Api) -> None:
    await api.generate(stream=True)
    text = (await api.client.get("/metrics")).text
    assert 'gen_ai_server_time_to_first_token_seconds_count{priority="interactive"}' in text
    assert 'headrace_gateway_requests_total{status="200"}' in text
    assert "acme" not in text


async def test_sigterm_finishes_running_streams_and_says_left(http_broker: Broker, api: Api) -> None:
    release = asyncio.Event()

    async def held(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [65])
        await release.wait()
        await driver.tokens(request, 1, [66], "length")
        await driver.complete(request, 2, "length")

    api.driver.script = held
    settings = config(http_broker, slot=1)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    for name in ("kafka", "slot", "shards", "worker_slots", "gateway_slots", "models_dir", "models"):
        environ[f"HEADRACE_{name.upper()}"] = str(getattr(settings, name))
    view = api.gateway.serving.view
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", env=environ)
    try:
        async with asyncio.timeout(30):
            await until(lambda: any(m.slot == 1 for m in view.live("gateway")))
            epoch = view.epoch_of("gateway", 1)
            assert epoch is not None
            heartbeat = view.live("gateway")[-1].heartbeat
            assert heartbeat is not None
            async with httpx.AsyncClient(base_url=f"http://{heartbeat.address}", timeout=20) as client:
                await ready(client)
                running = asyncio.create_task(
                    client.post("/v1/generate", json={**BODY, "stream": True}, headers=HEADERS)
                )
                await api.driver.next_request()
                process.send_signal(signal.SIGTERM)
                refused = await client.post("/v1/generate", content=b"{", headers=HEADERS)
                while refused.status_code == 400:
                    refused = await client.post("/v1/generate", content=b"{", headers=HEADERS)
                assert (await client.get("/health/ready")).json() == {
                    "status": "not ready",
                    "reasons": ["draining"],
                }
                refused = await client.post("/v1/generate", json=BODY, headers=HEADERS)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                release.set()
                assert events((await running).text)[-1]["type"] == "done"
            assert await process.wait() == 0
            await until(lambda: view.gone("gateway", 1, epoch) == "left: stopped")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
