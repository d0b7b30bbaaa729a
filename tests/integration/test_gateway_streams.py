"""Streams that clients come back to: two gateways and real topics; admission and the worker are scripted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from gateway.public_id import PublicId
from gateway.replay import RETRY_WAIT_MS
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
TEXT = "Grüße, 漢字 und 🙂. " * 4
TOKENS = list(TEXT.encode())
BODY = {"model": "simulated", "prompt": "hi", "max_tokens": len(TOKENS), "stream": True}


class Api(GatewayPair):
    async def read(
        self, stream: str, after: int | None = None, client: httpx.AsyncClient | None = None
    ) -> httpx.Response:
        headers = HEADERS if after is None else {**HEADERS, "last-event-id": str(after)}
        return await (client or self.other).get(f"/v1/streams/{stream}", headers=headers)


@pytest.fixture(scope="module")
def streams_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("streams-broker"), LAYOUT) as broker:
        yield broker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api_module(streams_broker: Broker) -> AsyncIterator[Api]:
    async with gateway_pair(streams_broker) as pair:
        yield Api(pair.gateways, pair.driver, pair.owner, pair.other)


@pytest_asyncio.fixture(loop_scope="module")
async def api(api_module: Api) -> AsyncIterator[Api]:
    yield api_module
    await api_module.nothing_open()


def parse(text: str) -> tuple[str, list[int], str]:
    """(text, ids, type of the last event) of a whole stream."""
    found, ids, kind = "", [], ""
    for event in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":"))
        if not lines:
            continue
        data = json.loads(lines["data"])
        kind = data["type"]
        found += data.get("text", "")
        ids.append(int(lines["id"]))
    return found, ids, kind


async def finished(api: Api) -> tuple[str, str]:
    """(id, whole body) of a stream that has ended."""
    worker = LedWorker(TOKENS)
    worker.allow(len(TOKENS))
    api.driver.script = worker
    response = await api.owner.post("/v1/generate", json=BODY, headers=HEADERS)
    return response.headers["x-headrace-stream"], response.text


async def test_an_ended_stream_is_read_at_both_gateways(api: Api) -> None:
    stream, body = await finished(api)
    whole, ids, kind = parse(body)
    assert (whole, kind) == (TEXT, "done")
    for client in (api.owner, api.other):
        again = await api.read(stream, client=client)
        assert again.status_code == 200
        assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert parse(again.text)[0] == TEXT
        assert again.text.split("\n\n")[-2:] == body.split("\n\n")[-2:]  # the same done event
    for after in (0, ids[len(ids) // 2], ids[-1]):
        known = bytes(TOKENS[: after + 1]).decode(errors="ignore")
        text, late, kind = parse((await api.read(stream, after)).text)
        assert (known + text, kind) == (TEXT, "done")
        assert late[0] > after or text == ""
    by_query = await api.other.get(f"/v1/streams/{stream}?starting_after=4", headers=HEADERS)
    assert parse(by_query.text)[0] == parse((await api.read(stream, 4)).text)[0]


async def test_a_page_reads_it_by_a_token_in_the_url(api: Api) -> None:
    stream, _ = await finished(api)
    made = await api.owner.post(f"/v1/streams/{stream}/token", headers=HEADERS)
    again = await api.other.get(made.json()["url"])
    assert (again.status_code, parse(again.text)[0]) == (200, TEXT)
    assert again.headers["access-control-allow-origin"] == "*"
    assert (await api.other.delete(made.json()["url"])).status_code == 401


async def test_many_clients_come_back_to_a_running_stream_by_few_readings(api: Api) -> None:
    worker = LedWorker(TOKENS)
    api.driver.script = worker
    worker.allow(9)
    async with api.owner.stream("POST", "/v1/generate", json=BODY, headers=HEADERS) as response:
        stream = response.headers["x-headrace-stream"]
        lines = response.aiter_lines()
        async for line in lines:
            if line == "id: 8":
                break
        back = [asyncio.create_task(api.read(stream, after)) for after in (*range(-1, 9),) * 3]
        scans = api.gateways[1].serving.scans
        await until(lambda: len(scans) > 0)
        most = 0
        for count in range(10, len(TOKENS) + 1):
            worker.allow(count)
            await asyncio.sleep(0.01)
            most = max(most, len(scans))
        assert most <= 2
        answers = await asyncio.wait_for(asyncio.gather(*back), 20)
        for after, answer in zip((*range(-1, 9),) * 3, answers, strict=True):
            known = bytes(TOKENS[: after + 1]).decode(errors="ignore")
            assert known + parse(answer.text)[0] == TEXT
        assert "".join([line async for line in lines]).endswith('"stop_reason":"length"}')
    await until(lambda: len(scans) == 0)


async def test_what_a_client_may_not_read_looks_like_nothing(api: Api) -> None:
    stream, _ = await finished(api)
    public_id = api.gateways[0].serving.public_ids.decode("acme", stream)
    answers = [
        await api.other.get(f"/v1/streams/{stream}", headers=OTHER_HEADERS),
        await api.other.get(f"/v1/streams/{stream[:-1]}", headers=HEADERS),
        await api.other.get("/v1/streams/x", headers=HEADERS),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"stream_not_found"}
    assert (await api.other.get(f"/v1/streams/{stream}")).status_code == 401
    bad = await api.other.get(f"/v1/streams/{stream}?starting_after=x", headers=HEADERS)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "starting_after")

    def moved(offset: int) -> str:
        where: PublicId = public_id._replace(first_offset=offset)
        return api.gateways[0].serving.public_ids.encode("acme", where)

    gone = await api.read(moved(10**9))
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "stream_expired")


async def test_a_refused_request_is_refused_again(api: Api) -> None:
    async def refuse(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.reject(request, 429, "rate_limit_exceeded", 3_000)

    api.driver.script = refuse
    first = await api.owner.post("/v1/generate", json=BODY, headers=HEADERS)
    again = await api.read(first.headers["x-headrace-stream"])
    assert (again.status_code, again.headers["retry-after"]) == (first.status_code, "3")
    assert again.json() == first.json()


async def test_readings_are_bounded(api: Api) -> None:
    stream, _ = await finished(api)
    public_id = api.gateways[0].serving.public_ids.decode("acme", stream)
    ids = api.gateways[0].serving.public_ids
    # Of requests that never were: each reading waits for an end that does not come. Those of its own
    # partitions (3 and 4) are soon at the end of what it reads anyway.
    places = [
        ids.encode("acme", public_id._replace(reply_partition=p, first_offset=0, request_id=bytes(16)))
        for p in (3, 4, 0, 1, 2, 5)
    ]
    scans = api.gateways[1].serving.scans
    held = [asyncio.create_task(api.read(place)) for place in places[:2]]
    assert scans.own is not None
    own = scans.own.feeds
    await until(lambda: own[3].read and own[4].read and len(scans) == 0)
    held += [asyncio.create_task(api.read(place)) for place in places[2:5]]
    await until(lambda: len(scans) == 3)
    refused = await api.read(places[5])
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "too_many_replays"
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until(lambda: len(scans) == 0)
    # They are read on for a while, but make room for whoever comes.
    late = asyncio.create_task(api.read(places[5]))
    await until(lambda: len(scans) == 1)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_what_was_read_here_is_read_again_without_the_log(api: Api) -> None:
    worker = LedWorker(TOKENS, allowed=9)
    api.driver.script = worker
    scans = [gateway.serving.scans for gateway in api.gateways]
    before = [each.started for each in scans]
    async with api.owner.stream("POST", "/v1/generate", json=BODY, headers=HEADERS) as response:
        stream = response.headers["x-headrace-stream"]
        lines = response.aiter_lines()
        async for line in lines:
            if line == "id: 8":
                break
        again = [asyncio.create_task(api.read(stream, after, api.owner)) for after in (-1, 3, 8)]
        elsewhere = [asyncio.create_task(api.read(stream, after)) for after in (-1, 3, 8)]
        await until(lambda: len(scans[1]) == 1)
        worker.allow(len(TOKENS))
        answers = await asyncio.wait_for(asyncio.gather(*again, *elsewhere), 20)
        body = "".join([line + "\n" async for line in lines])
    for after, answer in zip((-1, 3, 8) * 2, answers, strict=True):
        known = bytes(TOKENS[: after + 1]).decode(errors="ignore")
        assert known + parse(answer.text)[0] == TEXT
        assert answer.text.endswith(body[-200:])
    for client in (api.owner, api.other):  # and when it has ended
        assert (await api.read(stream, client=client)).text == answers[0].text
    assert [each.started for each in scans] == [before[0], before[1] + 1]
    assert (await api.read(stream, client=api.owner)).text == answers[0].text


async def read_some(api: Api, up_to: int, **headers: str) -> tuple[str, str]:
    """Opens a stream, reads up to the event with that id, and goes. (id of the stream, its text)."""
    async with api.owner.stream(
        "POST", "/v1/generate", json=BODY, headers={**HEADERS, **headers}
    ) as response:
        assert response.status_code == 200
        seen = ""
        async for line in response.aiter_lines():
            seen += line + "\n"
            if line == "" and f"id: {up_to}\n" in seen:
                return response.headers["x-headrace-stream"], parse(seen)[0]
    raise AssertionError(f"the stream ended before {up_to}: {seen}")


async def test_a_client_that_left_for_a_while_gets_the_rest_elsewhere(api: Api) -> None:
    worker = LedWorker(TOKENS)
    api.driver.script = worker
    worker.allow(9)
    stream, seen = await read_some(api, 8, **{"x-headrace-detach": "2"})
    owner = api.gateways[0].serving.owner
    (owned,) = owner.open.values()
    await until(lambda: owned.reader is None)
    back = asyncio.create_task(api.read(stream, 8))
    await until(lambda: bool(owned.state.readers))  # its Attach is in the log
    assert list(owned.state.readers) == [(1, api.gateways[1].serving.owner.epoch)]
    worker.allow(len(TOKENS))
    answer = await asyncio.wait_for(back, 20)
    assert seen + parse(answer.text)[0] == TEXT
    await api.driver.caught_up()
    assert api.driver.cancellations.empty()


async def test_a_client_that_does_not_come_back_in_time_is_cancelled(api: Api) -> None:
    async def held(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [97])
        await driver.next_cancellation()
        await driver.complete(request, 1, "cancelled")

    api.driver.script = held
    loop = asyncio.get_running_loop()
    await read_some(api, 0, **{"x-headrace-detach": "0.5"})
    left_at = loop.time()
    await until(lambda: not api.gateways[0].serving.owner.open)
    assert 0.4 < loop.time() - left_at < 2.0


async def test_the_last_reader_elsewhere_that_leaves_ends_it(api: Api) -> None:
    async def held(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [97])
        await driver.next_cancellation()
        await driver.complete(request, 1, "cancelled")

    api.driver.script = held
    stream, _ = await read_some(api, 0, **{"x-headrace-detach": "1"})
    (owned,) = api.gateways[0].serving.owner.open.values()
    async with api.other.stream("GET", f"/v1/streams/{stream}", headers=HEADERS) as response:
        assert response.status_code == 200
        await until(lambda: bool(owned.state.readers))
        await asyncio.sleep(1.2)  # longer than the detach time
        assert owned.cancelled is None
    await until(lambda: not owned.state.readers)
    await until(lambda: owned.cancelled == "disconnected")
    await until(lambda: owned.state.ended)


@pytest.mark.parametrize("at_owner", [True, False])
async def test_delete_ends_a_stream_for_all_that_read_it(api: Api, at_owner: bool) -> None:
    async def held(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [97, 98])
        cancellation = await driver.next_cancellation()
        assert cancellation.request_id == request.request_id
        await driver.complete(request, 2, "cancelled")

    api.driver.script = held
    async with api.owner.stream("POST", "/v1/generate", json=BODY, headers=HEADERS) as response:
        stream = response.headers["x-headrace-stream"]
        back = asyncio.create_task(api.read(stream))
        (owned,) = api.gateways[0].serving.owner.open.values()
        await until(lambda: bool(owned.state.readers))
        client = api.owner if at_owner else api.other
        assert (await client.delete(f"/v1/streams/{stream}", headers=OTHER_HEADERS)).status_code == 404
        answer = await client.delete(f"/v1/streams/{stream}", headers=HEADERS)
        assert answer.status_code == 202
        assert answer.json() == {"id": stream, "object": "stream", "status": "cancelling"}
        body = "".join([line + "\n" async for line in response.aiter_lines()])
    for text in (body, (await asyncio.wait_for(back, 5)).text):
        assert parse(text)[0] == "ab"
        assert '"stop_reason":"cancelled"' in text
    assert owned.cancelled == "cancelled"
    assert owned.state.attempt == 1  # no retry of what was not wanted


async def test_what_its_client_left_for_good_has_ended_for_who_reads_it_later(api: Api) -> None:
    api.driver.script = held
    stream, _ = await read_some(api, 1)
    await until(lambda: not api.gateways[0].serving.owner.open)
    # Without waiting for the retry of what ended early.
    answer = await asyncio.wait_for(api.read(stream), RETRY_WAIT_MS / 2_000)
    assert parse(answer.text)[0] == "ab"
    assert '"stop_reason":"cancelled"' in answer.text


async def test_what_did_not_end_in_time_reads_so_everywhere_and_in_the_bill(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = api.gateways[0].serving
    monkeypatch.setattr(serving, "config", replace(serving.config, end_ms=300))
    api.driver.script = held
    body = await api.owner.post("/v1/generate", json=BODY, headers=HEADERS)
    again = await api.read(body.headers["x-headrace-stream"])
    for answer in (body, again):
        assert answer.status_code == 200
        *_, token, last, _ = answer.text.split("\n\n")
        assert '"text":"b"' in token
        error = json.loads(last.split("data: ")[1])["error"]
        assert (error["code"], error["message"]) == ("deadline_exceeded", "not finished within 0.3 s")
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.output_tokens, usage.finish_reason) == (True, 2, "error")
    count = serving.metrics.registry.get_sample_value
    assert count("headrace_gateway_request_ends_total", {"reason": "deadline_exceeded"}) == 1


async def test_a_reading_outlives_a_broker_that_dies(api: Api, streams_broker: Broker) -> None:
    worker = LedWorker(TOKENS)
    api.driver.script = worker
    worker.allow(9)
    stream, seen = await read_some(api, 8, **{"x-headrace-detach": "60"})
    (owned,) = api.gateways[0].serving.owner.open.values()
    behind = {**HEADERS, "last-event-id": "8"}
    async with api.other.stream("GET", f"/v1/streams/{stream}", headers=behind) as back:
        assert back.status_code == 200
        streams_broker.kill()
        await asyncio.sleep(0.3)
        # Its own reading of the log is there to be joined, but not for another partition.
        ids = api.gateways[1].serving.public_ids
        elsewhere = ids.encode("acme", ids.decode("acme", stream)._replace(reply_partition=4))
        refused = await api.read(elsewhere)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        await streams_broker.start()
        worker.allow(len(TOKENS))
        async with asyncio.timeout(20):
            rest = "".join([line + "\n" async for line in back.aiter_lines()])
    assert seen + parse(rest)[0] == TEXT
    await until(lambda: owned.state.ended)
    assert seen + parse((await api.read(stream, 8)).text)[0] == TEXT


CHOICES = {**BODY, "prompt": ["a", "b"]}


async def test_choices_that_a_client_left_are_read_on_one_by_one(api: Api) -> None:
    worker = LedWorker(TOKENS, allowed=20)
    api.driver.script = worker
    headers = {**HEADERS, "x-headrace-detach": "30"}
    seen: dict[int, tuple[int, str]] = {0: (-1, ""), 1: (-1, "")}
    async with api.owner.stream("POST", "/v1/completions", json=CHOICES, headers=headers) as response:
        position = -1
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                position = int(line[4:])
            elif line.startswith("data: "):
                (choice,) = json.loads(line[6:])["choices"]
                seen[choice["index"]] = position, seen[choice["index"]][1] + choice["text"]
            if min(at for at, _ in seen.values()) >= 10:
                break
    streams = response.headers["x-headrace-stream"].split(", ")
    worker.allow(len(TOKENS))
    for stream, (after, text) in zip(streams, seen.values(), strict=True):
        rest, _, kind = parse((await api.read(stream, after)).text)
        assert (text + rest, kind) == (TEXT, "done")


async def test_a_choice_that_fails_ends_the_stream_and_stops_the_others(api: Api) -> None:
    stopped: asyncio.Queue[bytes] = asyncio.Queue()

    async def fail(driver: FleetDriver, request: InferenceRequest) -> None:
        await driver.dispatch(request)
        await driver.tokens(request, 0, [97])
        if request.prompt_token_ids[-1] == ord("b"):
            await driver.complete(request, 1, "error", "the engine stumbled")
        else:
            cancellation = await driver.next_cancellation()
            while cancellation.request_id != request.request_id:
                cancellation = await driver.next_cancellation()
            stopped.put_nowait(request.request_id)
            await driver.complete(request, 1, "cancelled")

    api.driver.script = fail
    response = await api.owner.post("/v1/completions", json=CHOICES, headers=HEADERS)
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "engine_error"
    await asyncio.wait_for(stopped.get(), 20)


async def test_a_choice_that_is_refused_refuses_all_over_the_log(api: Api) -> None:
    async def refuse(driver: FleetDriver, request: InferenceRequest) -> None:
        if request.prompt_token_ids[-1] == ord("b"):
            await driver.reject(request, 429, "token_rate_exceeded", 2_300)
            return
        await driver.dispatch(request)
        await driver.tokens(request, 0, [97])
        while (await driver.next_cancellation()).request_id != request.request_id:
            pass
        await driver.complete(request, 1, "cancelled")

    api.driver.script = refuse
    response = await api.owner.post("/v1/completions", json=CHOICES, headers=HEADERS)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    usage = await api.driver.next_usage()
    assert (usage.sealed, usage.input_tokens, usage.output_tokens) == (True, 0, 0)
