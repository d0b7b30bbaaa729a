"""Idempotency-Key at the gateway: what is sent with it, and a client that gets another request's answer."""

import asyncio
import json
from typing import Any

import pytest

from gateway.actions import Announce, Cancel
from gateway.idempotency import key_of
from gateway.replay import Replay
from schemas.api.errors import ApiError
from schemas.records import (
    Attach,
    Cancellation,
    Completion,
    Detach,
    Dispatched,
    Duplicate,
    InferenceRequest,
)
from schemas.stream_state import Run
from schemas.token_records import TokenChunk
from tests.gateway_factories import EPOCH, SLOT, WORKER_EPOCH, Call, Stand

KEYED = [(b"idempotency-key", b"abc")]
BODY = {"model": "simulated", "prompt": "hi", "max_tokens": 8}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
RUN = Run(0, WORKER_EPOCH)
FIRST_AT = 1_600_000_000_000


class HandScans:
    """Takes the place of the readings of the log: the test says what they find."""

    def __init__(self) -> None:
        self.followed: list[tuple[int, int, Replay]] = []
        self.left: list[Replay] = []
        self.error: ApiError | None = None

    def follow(self, partition: int, first_offset: int, replay: Replay) -> None:
        if self.error is not None:
            raise self.error
        self.followed.append((partition, first_offset, replay))

    def leave(self, replay: Replay) -> None:
        self.left.append(replay)


def stand() -> tuple[Stand, HandScans]:
    made, scans = Stand(), HandScans()
    made.serving.scans = scans  # type: ignore[assignment]
    return made, scans


async def first_and_second(
    made: Stand, path: str, body: dict[str, Any]
) -> tuple[InferenceRequest, InferenceRequest, Call]:
    """Two requests with one key; admission has told the second one so."""
    made.call(path=path, body=body, headers=KEYED)
    first = await made.request()
    call = made.call(path=path, body=body, headers=KEYED)
    second = await made.request()
    assert first.idempotency is not None
    record = Duplicate(second.request_id, first.idempotency.public_id, FIRST_AT)
    owned = made.serving.owner.on_duplicate(record)
    assert owned is not None
    made.serving.join(owned, record)
    return first, second, call


def feed(replay: Replay, request: InferenceRequest, text: bytes, finish: str = "length") -> None:
    replay.fold.on_record(Dispatched(request.request_id, 1, EPOCH, *RUN, "simulated"), 0)
    replay.fold.on_chunk(RUN, TokenChunk(request.request_id, 1, 0, list(text), finish), 0, 0.0)
    replay.fold.on_record(Completion(request.request_id, 1, *RUN, 3, 0, len(text), finish), 0)


async def test_the_key_and_what_was_asked_go_to_admission() -> None:
    made, _ = stand()
    asked = []
    for body in (BODY, dict(reversed(BODY.items())), {**BODY, "max_tokens": 9}):
        call = made.call(body=body, headers=KEYED)
        request = await made.request()
        assert request.idempotency is not None
        asked.append(request.idempotency)
        assert request.idempotency.key == key_of("acme", b"abc", 0)
        made.dispatched(request)
        made.tokens(request, 0, b"a", "length")
        made.complete(request, 1)
        await call.finish()
        assert call.headers[b"x-headrace-stream"].decode() == request.idempotency.public_id
    assert asked[0].body == asked[1].body  # only spelled in another order
    assert asked[0].body != asked[2].body
    assert len({each.public_id for each in asked}) == 3


async def test_choices_have_keys_of_their_own() -> None:
    made, _ = stand()
    made.call(path="/v1/chat/completions", body={**CHAT, "n": 2}, headers=KEYED)
    await made.request()
    keys = [owned.request.idempotency for owned in made.outbox.sent]
    assert [key and key.key for key in keys] == [key_of("acme", b"abc", 0), key_of("acme", b"abc", 1)]
    assert len({key_of("acme", b"abc", 0), key_of("acme", b"abc", 1), key_of("acm", b"eabc", 0)}) == 3


@pytest.mark.parametrize("keyed", [True, False])
async def test_who_is_refused_may_ask_with_its_key_at_once(keyed: bool) -> None:
    made, _ = stand()
    made.outbox.acked.clear()
    headers = KEYED if keyed else []
    call = made.call(path="/v1/chat/completions", body={**CHAT, "n": 2}, headers=headers)
    await made.request()
    let_in, refused = (owned.request for owned in made.outbox.sent)
    made.dispatched(let_in)
    made.reject(refused, 429, "concurrency_limit_exceeded", 1_000)
    await asyncio.sleep(0.01)
    assert bool(call.sent) is not keyed
    freed = [a.record for a in made.outbox.actions if isinstance(a, Cancel) and a.record.key is not None]
    assert [each.request_id for each in freed] == ([let_in.request_id] if keyed else [])
    made.outbox.acked.set()
    assert (await call.finish()).status == 429


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"\xc3\xa9", b"a\tb"])
async def test_a_key_that_is_none(key: bytes) -> None:
    made, _ = stand()
    call = await made.call(body=BODY, headers=[(b"idempotency-key", key)]).finish()
    assert (call.status, call.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert made.outbox.sent == []


async def test_a_key_gives_its_client_time_to_ask_again() -> None:
    made, _ = stand()
    for headers, detach_ms in ((KEYED, 30_000), ([*KEYED, (b"x-headrace-detach", b"0")], 0), ([], 0)):
        made.call(body=BODY, headers=headers)
        assert (await made.request()).detach_ms == detach_ms


async def test_the_second_gets_the_first_ones_answer_as_if_it_were_its_own() -> None:
    made, scans = stand()
    first, second, call = await first_and_second(made, "/v1/chat/completions", {**CHAT, "stream": True})
    ((partition, _, replay),) = scans.followed
    assert partition == first.reply_partition
    assert replay.request_id == first.request_id
    assert second.request_id not in made.serving.owner.open
    feed(replay, first, b"ab")
    await call.finish()
    events = [json.loads(line[6:]) for line in call.content.splitlines() if line.startswith(b"data: {")]
    assert {event["id"] for event in events} == {f"chatcmpl-{first.request_id.hex()}"}
    assert {event["created"] for event in events} == {FIRST_AT // 1000}
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "a", "b", None]
    assert first.idempotency is not None
    assert call.headers[b"x-headrace-stream"].decode() == first.idempotency.public_id
    assert call.headers[b"x-request-id"].decode() == second.request_id.hex()
    assert scans.left == [replay]
    announced = [a.record for a in made.outbox.actions if isinstance(a, Announce)]
    assert announced == [
        Attach(first.request_id, SLOT, EPOCH),
        Detach(first.request_id, SLOT, EPOCH, 30_000),
    ]
    assert len(made.outbox.actions) == 2  # nothing was cancelled, nothing billed


async def test_of_a_response_only_the_first_is_stored() -> None:
    made, scans = stand()
    body = {"model": "simulated", "input": "hi"}
    first, _, call = await first_and_second(made, "/v1/responses", body)
    assert made.outbox.descriptions == []  # which of them it is, admission has yet to say
    feed(scans.followed[0][2], first, b"hey")
    assert first.idempotency is not None
    assert (await call.finish()).json()["id"] == f"resp_{first.idempotency.public_id}"
    assert made.outbox.descriptions == []
    made.dispatched(first)
    await asyncio.sleep(0.01)
    assert [each.request_id for each in made.outbox.descriptions] == [first.request_id]


async def test_a_response_is_stored_before_its_answer_begins() -> None:
    made, _ = stand()
    body = {"model": "simulated", "input": "hi", "stream": True}
    call = made.call(path="/v1/responses", body=body, headers=KEYED)
    request = await made.request()
    made.dispatched(request)
    await call.until_started()
    assert [each.request_id for each in made.outbox.descriptions] == [request.request_id]
    refused = made.call(path="/v1/responses", body=body, headers=KEYED)
    made.reject(await made.request(), 429, "over_fair_share", 1_000)
    assert (await refused.finish()).status == 429
    assert len(made.outbox.descriptions) == 1


async def test_the_second_gets_a_whole_answer_too() -> None:
    made, scans = stand()
    first, _, call = await first_and_second(made, "/v1/chat/completions", CHAT)
    feed(scans.followed[0][2], first, b"hey")
    answer = (await call.finish()).json()
    assert answer["id"] == f"chatcmpl-{first.request_id.hex()}"
    assert answer["choices"][0]["message"]["content"] == "hey"
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_response_in_the_background_has_the_first_ones_id() -> None:
    made, _ = stand()
    body = {"model": "simulated", "input": "hi", "background": True}
    first, _, call = await first_and_second(made, "/v1/responses", body)
    await call.finish()
    assert first.idempotency is not None
    answer = call.json()
    assert (answer["id"], answer["created_at"]) == (
        f"resp_{first.idempotency.public_id}",
        FIRST_AT // 1000,
    )


async def test_a_first_that_was_stopped_is_no_answer() -> None:
    made, scans = stand()
    first, _, call = await first_and_second(made, "/v1/generate", BODY)
    replay = scans.followed[0][2]
    feed(replay, first, b"a", "cancelled")
    replay.fold.on_time(20_000, None)
    await call.finish()
    assert (call.status, call.json()["error"]["code"]) == (410, "cancelled")


async def test_a_first_whose_client_was_refused_has_its_key_freed_once_more() -> None:
    made, scans = stand()
    first, _, call = await first_and_second(made, "/v1/generate", BODY)
    replay = scans.followed[0][2]
    replay.fold.on_cancellation(Cancellation(first.request_id, 1, "other", "refused", waived=True))
    assert not replay.done
    replay.fold.on_cancellation(Cancellation(first.request_id, 1, "acme", "refused", waived=True))
    await call.finish()
    assert (call.status, call.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    assert call.headers[b"retry-after"] == b"1"
    (again,) = (action for action in made.outbox.actions if isinstance(action, Cancel))
    assert (again.record.request_id, again.record.key) == (first.request_id, key_of("acme", b"abc", 0))
    assert again.behind_request


async def test_a_client_that_leaves_the_answer_it_joined_stops_nothing() -> None:
    made, scans = stand()
    _, _, call = await first_and_second(made, "/v1/generate", BODY)
    call.disconnect()
    await call.finish()
    assert scans.left == [scans.followed[0][2]]
    assert all(isinstance(action, Announce) for action in made.outbox.actions)


@pytest.mark.parametrize("public_id", ["nonsense", "A" * 64])
async def test_a_first_that_cannot_be_read(public_id: str) -> None:
    made, _ = stand()
    call = made.call(body=BODY, headers=KEYED)
    request = await made.request()
    record = Duplicate(request.request_id, public_id, 0)
    owned = made.serving.owner.on_duplicate(record)
    assert owned is not None
    made.serving.join(owned, record)
    await call.finish()
    assert (call.status, call.json()["error"]["code"]) == (409, "idempotency_key_in_use")


async def test_too_many_readings_of_the_log() -> None:
    made, scans = stand()
    scans.error = ApiError(503, "too_many_replays", "later", None, 1_000)
    _, _, call = await first_and_second(made, "/v1/generate", BODY)
    await call.finish()
    assert (call.status, call.headers[b"retry-after"]) == (503, b"1")
