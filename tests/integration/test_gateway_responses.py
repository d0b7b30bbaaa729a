"""/v1/responses that are read again, at another gateway, over real topics; the fleet is scripted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from infra.local.broker import Broker
from schemas.records import InferenceRequest
from tests.fleet_driver import FleetDriver, until
from tests.gateway_pair import (
    HEADERS,
    LAYOUT,
    OTHER_HEADERS,
    GatewayPair,
    LedWorker,
    gateway_pair,
    held,
)
from tests.own_broker import own_broker

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/responses"
TEXT = "Grüße, 漢字 und 🙂."
TOKENS = list(TEXT.encode())
BODY = {"model": "simulated", "input": "hi", "max_output_tokens": len(TOKENS)}


@pytest.fixture(scope="module")
def responses_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("responses-broker"), LAYOUT) as broker:
        yield broker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair_module(responses_broker: Broker) -> AsyncIterator[GatewayPair]:
    async with gateway_pair(responses_broker) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="module")
async def pair(pair_module: GatewayPair) -> AsyncIterator[GatewayPair]:
    yield pair_module
    await pair_module.nothing_open()


async def create(pair: GatewayPair, **changes: Any) -> httpx.Response:
    return await pair.owner.post(PATH, json={**BODY, **changes}, headers=HEADERS)


async def get(client: httpx.AsyncClient, name: str, query: str = "") -> httpx.Response:
    return await client.get(f"{PATH}/{name}{query}", headers=HEADERS)


async def until_status(client: httpx.AsyncClient, name: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            response: dict[str, Any] = (await get(client, name)).json()
            if response["status"] == status:
                return response
            await asyncio.sleep(0.05)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def pieces(text: str) -> list[str]:
    """The bytes of each event, as text; without the comments between them."""
    return text.replace(": keep-alive\n", "").split("\n\n")[:-1]


async def test_a_background_response_is_followed_at_another_gateway(pair: GatewayPair) -> None:
    worker = LedWorker(TOKENS)
    pair.driver.script = worker
    answer = await create(pair, background=True, metadata={"order": "7"}, instructions="Greet.", user="u")
    created = answer.json()
    assert (answer.status_code, created["status"], created["output"]) == (200, "queued", [])
    name = created["id"]
    worker.allow(3)
    running = await until_status(pair.other, name, "in_progress")
    stream = asyncio.create_task(get(pair.other, name, "?stream=true"))
    worker.allow(len(TOKENS))
    done = await until_status(pair.other, name, "incomplete")
    for response in (running, done):
        assert response == {**created, **{key: response[key] for key in _CHANGES}}
        assert response["metadata"] == {"order": "7"}
    assert done["output"][0]["content"][0]["text"] == TEXT
    assert done["usage"]["output_tokens"] == len(TOKENS)
    assert (await get(pair.owner, name)).json() == done
    assert events((await stream).text)[-1]["response"] == done
    await pair.driver.caught_up()
    assert pair.driver.cancellations.empty()


async def test_who_polls_reads_no_log_where_it_is_known(pair: GatewayPair) -> None:
    worker = LedWorker(TOKENS, allowed=3)
    pair.driver.script = worker
    scans = [gateway.serving.scans for gateway in pair.gateways]
    before = [each.started for each in scans]
    name = (await create(pair, background=True)).json()["id"]
    for client in (pair.owner, pair.other):
        await until_status(client, name, "in_progress")
    worker.allow(len(TOKENS))
    done = [await until_status(client, name, "incomplete") for client in (pair.owner, pair.other)]
    assert done[0] == done[1] == (await get(pair.owner, name)).json()
    assert done[0]["output"][0]["content"][0]["text"] == TEXT
    streamed = [(await get(client, name, "?stream=true")).text for client in (pair.owner, pair.other)]
    assert pieces(streamed[0]) == pieces(streamed[1])
    assert [each.started for each in scans] == [before[0], before[1] + 1]
    # One that nobody asked for while it ran is known where it ran.
    name = (await create(pair)).json()["id"]
    assert (await get(pair.owner, name)).json()["status"] == "incomplete"
    assert scans[0].started == before[0]


_CHANGES = ("status", "output", "usage", "incomplete_details")


async def test_both_gateways_go_on_behind_any_number(pair: GatewayPair) -> None:
    pair.driver.script = LedWorker(TOKENS, len(TOKENS))
    first = await create(pair, stream=True)
    name = events(first.text)[0]["response"]["id"]
    whole = pieces(first.text)
    numbers = [event["sequence_number"] for event in events(first.text)]
    assert numbers == sorted(set(numbers))
    assert events(first.text)[-1]["type"] == "response.incomplete"
    for i in (0, 3, 4, len(numbers) // 2, len(numbers) - 5, len(numbers) - 2, len(numbers) - 1):
        for client in (pair.owner, pair.other):
            again = await get(client, name, f"?stream=true&starting_after={numbers[i]}")
            assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert pieces(again.text) == whole[i + 1 :]


async def test_a_background_stream_runs_on_without_its_client(pair: GatewayPair) -> None:
    worker = LedWorker(TOKENS)
    pair.driver.script = worker
    body = {**BODY, "background": True, "stream": True}
    worker.allow(5)
    async with pair.owner.stream("POST", PATH, json=body, headers=HEADERS) as response:
        seen = ""
        async for line in response.aiter_lines():
            seen += line + "\n"
            if line.startswith("data: ") and '"delta":"' in line:
                break
    created, last = events(seen)[0], events(seen)[-1]
    assert created["response"]["status"] == "queued"
    name, number = created["response"]["id"], last["sequence_number"]
    (owned,) = pair.gateways[0].serving.owner.open.values()
    await until(lambda: owned.reader is None)
    back = asyncio.create_task(get(pair.other, name, f"?stream=true&starting_after={number}"))
    worker.allow(len(TOKENS))
    rest = events((await back).text)
    shown = "".join(event["delta"] for event in [*events(seen), *rest] if "delta" in event)
    assert (shown, rest[-1]["type"]) == (TEXT, "response.incomplete")


@pytest.mark.parametrize("at_owner", [True, False])
async def test_a_cancel_answers_with_the_cancelled_response(pair: GatewayPair, at_owner: bool) -> None:
    pair.driver.script = held
    name = (await create(pair, background=True)).json()["id"]
    await until_status(pair.other, name, "in_progress")
    client = pair.owner if at_owner else pair.other
    foreign = await client.post(f"{PATH}/{name}/cancel", headers=OTHER_HEADERS)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "response_not_found")
    cancelled = await client.post(f"{PATH}/{name}/cancel", headers=HEADERS)
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert cancelled.json()["output"][0]["content"][0]["text"] == "ab"
    again = await pair.other.post(f"{PATH}/{name}/cancel", headers=HEADERS)
    assert again.json() == cancelled.json() == (await get(pair.other, name)).json()
    assert events((await get(pair.owner, name, "?stream=true")).text)[-1]["response"] == again.json()


async def test_a_response_that_did_not_end_in_time_has_failed(
    pair: GatewayPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = pair.gateways[0].serving
    monkeypatch.setattr(serving, "config", replace(serving.config, end_ms=300))
    pair.driver.script = held
    seen = events((await create(pair, stream=True)).text)[-1]
    name = seen["response"]["id"]
    for client in (pair.owner, pair.other):
        response = (await get(client, name)).json()
        assert response == seen["response"]
        assert response["status"] == "failed"
        assert response["error"]["message"] == "deadline_exceeded: not finished within 0.3 s"
        assert response["output"][0]["content"][0]["text"] == "ab"


async def test_a_refusal_behind_the_answer_is_a_failed_response(pair: GatewayPair) -> None:
    async def refuse(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.reject(request, 429, "token_rate_exceeded", 3_000)

    pair.driver.script = refuse
    assert (await create(pair)).status_code == 429
    name = (await create(pair, background=True)).json()["id"]
    failed = await until_status(pair.other, name, "failed")
    assert failed["error"]["code"] == "rate_limit_exceeded"
    assert failed["error"]["message"].startswith("token_rate_exceeded: ")
    last = events((await get(pair.other, name, "?stream=true")).text)[-1]
    assert (last["type"], last["response"]) == ("response.failed", failed)


async def test_what_cannot_be_read_is_refused(pair: GatewayPair) -> None:
    pair.driver.script = LedWorker(TOKENS, len(TOKENS))
    name = (await create(pair)).json()["id"]
    assert (await get(pair.other, name)).json()["status"] == "incomplete"
    foreign = await pair.other.get(f"{PATH}/{name}", headers=OTHER_HEADERS)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "response_not_found")
    ids = pair.gateways[0].serving.public_ids
    place = ids.decode("acme", name.removeprefix("resp_"))
    gone = await get(pair.other, f"resp_{ids.encode('acme', place._replace(first_offset=10**9))}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "stream_expired")
    for query, param in (
        ("?starting_after=4", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=yes", "stream"),
        ("?include=file_search_call.results", "include"),
        ("?limit=3", "limit"),
    ):
        refused = await get(pair.other, name, query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
