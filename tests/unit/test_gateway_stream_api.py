"""/v1/streams/{id} over raw ASGI: who may do what, and what goes to the log. Reading is in integration/."""

import asyncio
from typing import Any

import pytest

from gateway.actions import Announce, Cancel
from gateway.public_id import PublicId, hash_model
from schemas import topics
from schemas.records import Attach, Detach, Tenant
from tests.gateway_factories import EPOCH, FREE_KEY, SLOT, Call, Stand

RID = bytes(range(16))
STREAM = {"model": "simulated", "prompt": "hi", "stream": True}


def stream_id(stand: Stand, **changes: Any) -> str:
    public_id = PublicId(7, 0, RID, 1, hash_model("simulated"), may_be_cut=False)
    return stand.serving.public_ids.encode("acme", public_id._replace(**changes))


async def done(call: Call) -> tuple[int, str]:
    await call.finish()
    return call.status, call.json()["error"]["code"]


@pytest.mark.parametrize(("method", "tail"), [("GET", ""), ("DELETE", ""), ("POST", "/token")])
async def test_only_its_tenant_knows_a_stream(method: str, tail: str) -> None:
    stand = Stand()
    path = f"/v1/streams/{stream_id(stand)}{tail}"
    assert await done(stand.call(method, path, key=FREE_KEY, parts=[b""])) == (404, "stream_not_found")
    assert await done(stand.call(method, path, key=None, parts=[b""])) == (401, "missing_api_key")
    assert await done(stand.call(method, f"/v1/streams/abc{tail}", parts=[b""])) == (404, "stream_not_found")
    stand.serving.draining = True
    assert await done(stand.call(method, path, parts=[b""])) == (503, "draining")
    assert stand.outbox.actions == []


async def test_a_stream_of_a_model_that_is_not_served_here() -> None:
    stand = Stand()
    path = f"/v1/streams/{stream_id(stand, model_hash=bytes(4))}"
    assert await done(stand.call("GET", path)) == (503, "model_not_served")


@pytest.mark.parametrize("value", [b"x", b"", b"-2", b"1.5", b"9" * 19, b" 1", "١".encode()])
async def test_a_position_that_is_none(value: bytes) -> None:
    stand = Stand()
    call = stand.call("GET", f"/v1/streams/{stream_id(stand)}", headers=[(b"last-event-id", value)])
    assert await done(call) == (400, "invalid_value")
    assert call.json()["error"]["param"] == "Last-Event-ID"


async def test_a_detach_time_that_is_none_sends_no_request() -> None:
    stand = Stand()
    call = stand.call(body=STREAM, headers=[(b"x-headrace-detach", b"601")])
    assert await done(call) == (400, "invalid_value")
    assert call.json()["error"]["param"] == "X-Headrace-Detach"
    assert stand.serving.owner.open == {}
    assert b"x-headrace-stream" not in call.headers  # it was never sent


async def test_delete_at_another_gateway_tells_the_owner_first() -> None:
    stand = Stand()
    stream = stream_id(stand)
    call = await stand.call("DELETE", f"/v1/streams/{stream}").finish()
    assert (call.status, call.json()["status"]) == (202, "cancelling")
    word, cancel = stand.outbox.actions
    assert isinstance(word, Announce)
    assert isinstance(cancel, Cancel)
    assert word.reply_partition == 7
    assert word.record == cancel.record
    assert (cancel.record.request_id, cancel.record.tenant, cancel.record.slot) == (RID, "acme", None)
    assert (cancel.partition, cancel.behind_request) == (topics.tenant_partition("acme", 1, 4), True)


async def test_delete_at_the_owner_cancels_and_its_client_hears_the_end() -> None:
    stand = Stand()
    call = stand.call(body=STREAM)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"ab")
    await call.until_body(b'"b"')
    path = f"/v1/streams/{call.headers[b'x-headrace-stream'].decode()}"
    assert (await stand.call("DELETE", path).finish()).status == 202
    assert [type(action) for action in stand.outbox.actions] == [Announce, Cancel]
    assert (await stand.call("DELETE", path).finish()).status == 202
    assert [type(action) for action in stand.outbox.actions].count(Cancel) == 1
    stand.complete(request, 2, "cancelled")
    await call.finish()
    assert b'"stop_reason":"cancelled"' in call.content


async def test_a_client_with_detach_time_that_leaves_cancels_nothing_yet() -> None:
    stand = Stand()
    call = stand.call(body=STREAM, headers=[(b"x-headrace-detach", b"5")])
    request = await stand.request()
    stand.dispatched(request)
    await call.until_started()
    call.disconnect()
    await call.finish()
    assert stand.outbox.actions == []
    (owned,) = stand.serving.owner.open.values()
    assert (owned.reader, owned.detach_ms, owned.cancelled) == (None, 5_000, None)


async def test_a_reader_says_that_it_comes_and_goes() -> None:
    stand = Stand()
    path = f"/v1/streams/{stream_id(stand)}"
    call = stand.call("GET", path, headers=[(b"x-headrace-detach", b"2")])
    async with asyncio.timeout(5):
        while not stand.outbox.actions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call.disconnect()
    await call.finish()
    assert stand.outbox.actions == [
        Announce(Attach(RID, SLOT, EPOCH), 7),
        Announce(Detach(RID, SLOT, EPOCH, 2_000), 7),
    ]
    await stand.serving.scans.stop()


def with_query(stand: Stand, stream: str, query: str) -> Call:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await stand.app({**scope, "query_string": query.encode()}, receive, send)

    return Call(app, "GET", f"/v1/streams/{stream}", key=None)


async def test_a_token_reads_one_stream_and_does_nothing_else() -> None:
    stand = Stand()
    stream = stream_id(stand)
    made = (await stand.call("POST", f"/v1/streams/{stream}/token", body={"expires_in": 60}).finish()).json()
    assert made["url"] == f"/v1/streams/{stream}?token={made['token']}"
    # It gets as far as the position, which is wrong.
    call = with_query(stand, stream, f"token={made['token']}&starting_after=x")
    assert await done(call) == (400, "invalid_value")
    assert call.headers[b"access-control-allow-origin"] == b"*"
    other = stream_id(stand, reply_partition=6)
    assert await done(with_query(stand, other, f"token={made['token']}")) == (401, "invalid_stream_token")
    assert await done(with_query(stand, stream, "token=")) == (401, "invalid_stream_token")
    late = stand.serving.stream_tokens.issue("acme", stream, 1_000)
    assert await done(with_query(stand, stream, f"token={late}")) == (401, "invalid_stream_token")
    stand.serving.tenants.put("acme", Tenant("acme", 0, [], [], disabled=True))
    assert await done(with_query(stand, stream, f"token={made['token']}")) == (403, "tenant_disabled")
    stand.serving.tenants.put("acme", None)
    assert await done(with_query(stand, stream, f"token={made['token']}")) == (403, "unknown_tenant")


@pytest.mark.parametrize("body", [{"expires_in": 0}, {"expires_in": 3_601}, {"other": 1}])
async def test_a_token_has_limits(body: object) -> None:
    stand = Stand()
    call = await stand.call("POST", f"/v1/streams/{stream_id(stand)}/token", body=body).finish()
    assert call.status == 400


async def test_a_drain_waits_for_what_may_be_read_elsewhere() -> None:
    stand = Stand()
    call = stand.call(body=STREAM, headers=[(b"x-headrace-detach", b"5")])
    request = await stand.request()
    stand.dispatched(request)
    await call.until_started()
    call.disconnect()
    await call.finish()
    ended = asyncio.create_task(stand.serving.all_ended())
    await asyncio.sleep(0.15)
    assert not ended.done()
    stand.complete(request, 0)
    await asyncio.wait_for(ended, 5)
