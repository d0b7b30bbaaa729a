"""/v1/messages over raw ASGI: exact bytes, errors in Anthropic's shape."""

import asyncio
import time
from typing import Any

import pytest

from schemas.api.errors import TYPES, ApiError
from schemas.records import InferenceRequest
from tests.gateway_factories import Call, Stand

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "simulated",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hi"}],
}
PROMPT = len(b"<|user|>hi\n<|assistant|>")
PING = 'event: ping\ndata: {"type":"ping"}\n\n'


async def asked(stand: Stand, **changes: Any) -> tuple[Call, InferenceRequest]:
    call = stand.call(path=PATH, body={**BODY, **changes})
    request = await stand.request()
    stand.dispatched(request)
    return call, request


def usage(output_tokens: int, cached_tokens: int = 0) -> str:
    return (
        f'"usage":{{"input_tokens":{PROMPT - cached_tokens},"cache_creation_input_tokens":0,'
        f'"cache_read_input_tokens":{cached_tokens},"output_tokens":{output_tokens}}}'
    )


def opening(request: InferenceRequest) -> str:
    return (
        'event: message_start\nid: -1\ndata: {"type":"message_start","message":{"id":"msg_'
        + request.request_id.hex()
        + '","type":"message","role":"assistant","model":"simulated","content":[],"stop_reason":null,'
        + f'"stop_sequence":null,{usage(0)}}}}}\n\n'
        + 'event: content_block_start\nid: -1\ndata: {"type":"content_block_start","index":0,'
        + '"content_block":{"type":"text","text":""}}\n\n'
        + PING
    )


def delta(position: int, text: str) -> str:
    return (
        f'event: content_block_delta\nid: {position}\ndata: {{"type":"content_block_delta","index":0,'
        f'"delta":{{"type":"text_delta","text":"{text}"}}}}\n\n'
    )


def closing(position: int, reason: str, sequence: str = "null") -> str:
    return (
        f'event: content_block_stop\nid: {position}\ndata: {{"type":"content_block_stop","index":0}}\n\n'
        f'event: message_delta\nid: {position}\ndata: {{"type":"message_delta","delta":{{"stop_reason":'
        f'"{reason}","stop_sequence":{sequence}}},{usage(position + 1)}}}\n\n'
        f'event: message_stop\nid: {position}\ndata: {{"type":"message_stop"}}\n\n'
    )


async def test_the_bytes_of_a_stream() -> None:
    stand = Stand()
    call, request = await asked(stand, stream=True)
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"a"')
    stand.tokens(request, 1, "\né".encode())
    await call.until_body("é".encode())
    stand.tokens(request, 4, [257], "stop")
    stand.complete(request, 5, "stop")
    await call.finish()
    assert call.content.decode() == (
        opening(request) + delta(0, "a") + delta(1, "\\n") + delta(3, "é") + closing(4, "end_turn")
    )
    assert call.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert call.headers[b"request-id"] == call.headers[b"x-request-id"]


async def test_a_stream_says_which_sequence_stopped_it() -> None:
    stand = Stand()
    call, request = await asked(stand, stream=True, stop_sequences=["\n\n", "STOP"])
    stand.tokens(request, 0, b"hey")
    await call.until_body(b'"y"')
    stand.tokens(request, 3, b" STOPx", "stop")
    stand.complete(request, 9, "stop", text_length=4)
    await call.finish()
    said = delta(0, "h") + delta(1, "e") + delta(2, "y")
    assert call.content.decode() == (
        opening(request) + said + delta(8, " ") + closing(8, "stop_sequence", '"STOP"')
    )


async def test_a_stream_that_reached_its_limit() -> None:
    stand = Stand()
    call, request = await asked(stand, stream=True, max_tokens=1)
    stand.tokens(request, 0, b"a", "length")
    stand.complete(request, 1)
    await call.finish()
    assert call.content.decode() == opening(request) + delta(0, "a") + closing(0, "max_tokens")


async def test_pings_keep_a_waiting_stream_alive() -> None:
    stand = Stand(keep_alive_s=4.0, start_wait_s=4.0)
    call, request = await asked(stand, stream=True)
    await call.until_body(PING.encode())
    now = time.monotonic()
    for later, pings in ((3.5, 1), (4.5, 2)):
        stand.serving.owner.tick(stand.serving.view, request.accepted_at, now + later)
        await asyncio.sleep(0.01)
        assert call.content.decode() == opening(request) + PING * (pings - 1)
    stand.serving.readers[request.request_id].on_end(ApiError(503, "shutting_down", "bye"))
    await call.finish()
    assert call.content.decode() == opening(request) + PING + (
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"bye"},'
        f'"request_id":"{request.request_id.hex()}"}}\n\n'
    )


@pytest.mark.parametrize(
    ("stop", "finish", "reason", "sequence"),
    [
        (None, "stop", "end_turn", None),
        (4, "stop", "stop_sequence", "STOP"),
        (None, "length", "max_tokens", None),
    ],
)
async def test_a_whole_answer(stop: int | None, finish: str, reason: str, sequence: str | None) -> None:
    stand = Stand()
    call, request = await asked(stand, stop_sequences=["STOP"])
    ids = [*b"hey STOP"] if stop else [*b"hey !"]
    stand.tokens(request, 0, ids, finish)
    stand.complete(request, len(ids), finish, text_length=stop)
    answer = (await call.finish()).json()
    assert answer["content"] == [{"type": "text", "text": "hey !" if finish == "length" else "hey "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert (answer["id"], answer["type"]) == (f"msg_{request.request_id.hex()}", "message")
    assert answer["usage"]["output_tokens"] == len(ids)


async def test_tokens_are_counted_without_a_worker() -> None:
    body = {"model": "simulated", "messages": BODY["messages"]}
    call = await Stand().call(path=f"{PATH}/count_tokens", body=body).finish()
    assert (call.status, call.json()) == (200, {"input_tokens": PROMPT})


@pytest.mark.parametrize(
    ("path", "method", "body", "key", "status", "kind"),
    [
        (PATH, "POST", {**BODY, "tools": [{}]}, True, 400, "invalid_request_error"),
        (PATH, "POST", b"{", True, 400, "invalid_request_error"),
        (PATH, "POST", BODY, False, 401, "authentication_error"),
        (PATH, "POST", {**BODY, "model": "gpt-9"}, True, 404, "not_found_error"),
        (PATH, "GET", None, True, 405, "invalid_request_error"),
        (f"{PATH}/none", "POST", {}, True, 404, "not_found_error"),
        (f"{PATH}/count_tokens", "POST", BODY, True, 400, "invalid_request_error"),
        (f"{PATH}/count_tokens", "POST", BODY, False, 401, "authentication_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    path: str, method: str, body: object, key: bool, status: int, kind: str
) -> None:
    options: dict[str, Any] = {} if key else {"key": None}
    call = await Stand().call(method, path, body=body, **options).finish()
    answer = call.json()
    assert call.status == status
    assert answer == {
        "type": "error",
        "error": {"type": kind, "message": answer["error"]["message"]},
        "request_id": call.headers[b"request-id"].decode(),
    }
    assert answer["error"]["message"]


async def test_an_api_key_header_and_a_version_are_accepted() -> None:
    stand = Stand()
    key = stand.call(path=PATH, body=BODY, key=None, headers=[(b"x-api-key", b"hr_wrong")])
    assert (await key.finish()).status == 401
    call = stand.call(path=PATH, body=BODY, headers=[(b"anthropic-version", b"2023-06-01")])
    request = await stand.request()
    stand.reject(request, 429, "rate_limit_exceeded", 2_000)
    assert (await call.finish()).json()["error"]["type"] == "rate_limit_error"
    assert call.headers[b"retry-after"] == b"2"


def test_every_status_has_a_type_of_anthropics() -> None:
    known = {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "timeout_error",
        "overloaded_error",
    }
    assert {kind for _, kind in TYPES.values()} == known
