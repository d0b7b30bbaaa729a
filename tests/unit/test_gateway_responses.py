"""/v1/responses over raw ASGI: the bytes of its events, its whole answers, and the background."""

import json
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from gateway.actions import Announce, Cancel
from schemas.records import Cancellation, Failed, InferenceRequest, TokenLogprobs
from tests.gateway_factories import Call, Stand

PATH = "/v1/responses"
BODY = {"model": "simulated", "input": "hi", "max_output_tokens": 3}


def create(stand: Stand, **changes: Any) -> Call:
    return stand.call(path=PATH, body={**BODY, **changes})


def created(call: Call, request: InferenceRequest, **changes: Any) -> dict[str, Any]:
    """The response object as it should be, but for `changes`."""
    return {
        "id": "resp_" + call.headers[b"x-headrace-stream"].decode(),
        "object": "response",
        "created_at": request.accepted_at // 1000,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 3,
        "max_tool_calls": None,
        "metadata": {},
        "model": "simulated",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **changes,
    }


def item(request: InferenceRequest, status: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{request.request_id.hex()}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(content),
    }


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage(request: InferenceRequest, output_tokens: int) -> dict[str, Any]:
    inputs = len(request.prompt_token_ids) or 24
    return {
        "input_tokens": inputs,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": inputs + output_tokens,
    }


def event(kind: str, number: int, event_id: int | None, **fields: Any) -> bytes:
    name = f"response.{kind}"
    data = json.dumps(
        {"type": name, "sequence_number": number, **fields}, separators=(",", ":"), ensure_ascii=False
    )
    event_line = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {name}\n{event_line}data: {data}\n\n".encode()


def opening(call: Call, request: InferenceRequest, place: dict[str, Any]) -> bytes:
    running = created(call, request)
    return (
        event("in_progress", 1, -1, response=running)
        + event("output_item.added", 2, -1, output_index=0, item=item(request, "in_progress"))
        + event("content_part.added", 3, -1, **place, part=part(""))
    )


def place_of(request: InferenceRequest) -> dict[str, Any]:
    return {"item_id": f"msg_{request.request_id.hex()}", "output_index": 0, "content_index": 0}


async def test_the_bytes_of_a_stream() -> None:
    stand = Stand()
    call = create(stand, stream=True)
    request = await stand.request()
    stand.dispatched(request)
    await call.until_body(b"content_part.added")
    stand.tokens(request, 0, "é".encode())
    await call.until_body(b'"delta"')
    stand.tokens(request, 2, b"!", "length")
    stand.complete(request, 3)
    await call.finish()
    place = place_of(request)
    done = item(request, "incomplete", part("é!"))
    end = created(
        call,
        request,
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
        output=[done],
        usage=usage(request, 3),
    )
    assert call.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert call.content == b"".join(
        [
            event("created", 0, -1, response=created(call, request)),
            opening(call, request, place),
            event("output_text.delta", 5, 1, **place, delta="é", logprobs=[]),
            event("output_text.delta", 6, 2, **place, delta="!", logprobs=[]),
            event("output_text.done", 7, 2, **place, text="é!", logprobs=[]),
            event("content_part.done", 8, 2, **place, part=part("é!")),
            event("output_item.done", 9, 2, output_index=0, item=done),
            event("incomplete", 10, 2, response=end),
        ]
    )


async def test_a_stream_that_says_nothing_at_all() -> None:
    stand = Stand()
    call = create(stand, stream=True)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, [257], "stop")
    stand.complete(request, 1, "stop")
    await call.finish()
    place = place_of(request)
    done = item(request, "completed", part(""))
    end = created(call, request, status="completed", output=[done], usage=usage(request, 1))
    assert call.content.endswith(
        opening(call, request, place)
        + event("output_text.done", 5, 0, **place, text="", logprobs=[])
        + event("content_part.done", 6, 0, **place, part=part(""))
        + event("output_item.done", 7, 0, output_index=0, item=done)
        + event("completed", 8, 0, response=end)
    )


async def test_a_stream_whose_request_fails_ends_with_the_failed_response() -> None:
    stand = Stand()
    call = create(stand, stream=True)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"delta"')
    owned = stand.outbox.sent[-1]
    stand.tell(failure(request, owned.state.owner_epoch))
    await call.finish()
    end = created(
        call,
        request,
        status="failed",
        error={"code": "server_error", "message": "worker_lost: gone"},
        output=[item(request, "incomplete", part("a"))],
    )
    assert call.content.endswith(event("failed", 5, None, response=end))
    assert b"[DONE]" not in call.content


def failure(request: InferenceRequest, epoch: int | None) -> Any:

    assert epoch is not None
    return Failed(request.request_id, 1, epoch, "worker_lost", "gone")


async def test_an_error_that_is_not_the_responses_repeats_the_last_number() -> None:
    stand = Stand()
    call = create(stand, stream=True)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"delta"')
    late_ms = request.accepted_at + request.end_ms
    for now_ms in (late_ms, late_ms + 2_000):  # the log says no end
        stand.outbox.put(stand.serving.owner.tick(stand.serving.view, now_ms, 0.0))
    await call.finish()
    last = call.content.split(b"\n\n")[-2].decode()
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "sequence_number": 4,
        "code": "deadline_exceeded",
        "message": "not finished within 600 s",
        "param": None,
    }


@pytest.mark.parametrize(
    ("finish", "ids", "status", "text"),
    [("length", b"abc", "incomplete", "abc"), ("stop", [97, 257], "completed", "a")],
)
async def test_a_whole_answer(finish: str, ids: Any, status: str, text: str) -> None:
    stand = Stand()
    call = create(stand)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, ids, finish)
    stand.complete(request, len(ids), finish)
    await call.finish()
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert call.json() == created(
        call,
        request,
        status=status,
        incomplete_details=details,
        output=[item(request, status, part(text))],
        usage=usage(request, len(ids)),
    )


async def test_log_probabilities_stand_beside_the_text() -> None:
    stand = Stand()
    call = create(stand, stream=True, include=["message.output_text.logprobs"], top_logprobs=1)
    request = await stand.request()
    assert request.sampling.logprobs == 1
    stand.dispatched(request)
    told = [TokenLogprobs(-0.5, [98], [-0.25]), TokenLogprobs(-1.0, [97], [-2.0])]
    stand.tokens(request, 0, b"a", None, told[:1])
    await call.until_body(b'"delta"')
    stand.tokens(request, 1, b"b", "length", told[1:])
    stand.complete(request, 2)
    await call.finish()
    found = [json.loads(line[6:]) for line in call.content.split(b"\n") if line.startswith(b"data: ")]
    deltas = [data["logprobs"] for data in found if data["type"] == "response.output_text.delta"]
    assert deltas[0] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}],
        }
    ]
    assert [entry["token"] for entry in deltas[1]] == ["b"]
    (done,) = (data for data in found if data["type"] == "response.output_text.done")
    assert done["logprobs"] == deltas[0] + deltas[1]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]


def count_of(stand: Stand, name: str, **labels: str) -> float | None:
    return stand.serving.metrics.registry.get_sample_value(f"headrace_gateway_{name}_total", labels)


async def test_a_background_response_is_told_at_once_and_runs_on() -> None:
    stand = Stand()
    call = await create(stand, background=True, metadata={"k": "v"}).finish()
    request = await stand.request()
    expected = created(call, request, status="queued", background=True, metadata={"k": "v"})
    assert (call.status, call.json()) == (200, expected)
    (description,) = stand.outbox.descriptions
    assert description.request_id == request.request_id
    assert json.loads(description.body) == expected
    owned = stand.serving.owner.open[request.request_id]
    assert (owned.reader, owned.detach_ms) == (None, request.end_ms)
    assert not any(isinstance(action, Cancel) for action in stand.outbox.actions)
    assert not stand.serving.readers
    stand.dispatched(request)
    stand.tokens(request, 0, b"abc", "length")
    assert count_of(stand, "request_ends", reason="length") is None
    stand.complete(request, 3)
    assert count_of(stand, "request_ends", reason="length") == 1
    assert count_of(stand, "output_tokens") == 3


async def test_an_end_is_counted_when_the_log_says_it_and_once() -> None:
    stand = Stand()
    call = create(stand, stream=True)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"ab")
    await call.until_body(b'"delta"')
    call.disconnect()
    await call.finish()
    assert count_of(stand, "request_ends", reason="disconnected") is None
    stand.complete(request, 2, "cancelled")
    stand.complete(request, 2, "cancelled")
    assert count_of(stand, "request_ends", reason="disconnected") == 1
    assert count_of(stand, "request_ends", reason="cancelled") is None
    assert count_of(stand, "output_tokens") == 2
    # It is stored: who asks for it learns at once that this is the end.
    words = [action.record for action in stand.outbox.actions if isinstance(action, Announce)]
    assert words == [Cancellation(request.request_id, 1, "acme", "disconnected")]


async def test_a_background_stream_begins_before_a_worker_has_it() -> None:
    stand = Stand()
    call = create(stand, background=True, stream=True)
    request = await stand.request()
    await call.until_body(b": keep-alive")
    expected = created(call, request, status="queued", background=True)
    assert call.content == event("created", 0, -1, response=expected) + b": keep-alive\n"
    stand.dispatched(request)
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"delta"')
    call.disconnect()
    await call.finish()
    assert request.request_id in stand.serving.owner.open
    assert not any(isinstance(action, Cancel) for action in stand.outbox.actions)


async def test_what_is_not_stored_is_not_described_and_not_found() -> None:
    stand = Stand()
    call = create(stand, store=False)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"a", "length")
    stand.complete(request, 1)
    await call.finish()
    assert stand.outbox.descriptions == []
    assert call.json()["store"] is False
    again = await stand.call("GET", f"{PATH}/{call.json()['id']}").finish()
    assert (again.status, again.json()["error"]["code"]) == (404, "response_not_found")


async def test_a_response_that_cannot_be_stored_is_refused_and_stopped() -> None:
    stand = Stand()
    stand.outbox.error = KafkaConnectionError("gone")
    call = await create(stand, background=True).finish()
    assert (call.status, call.json()["error"]["code"]) == (503, "broker_unavailable")
    (owned,) = stand.serving.owner.open.values()
    assert owned.cancelled == "broker_unavailable"


@pytest.mark.parametrize(
    ("method", "suffix", "status", "code"),
    [("DELETE", "", 405, "method_not_allowed"), ("GET", "/input_items", 404, "not_found")],
)
async def test_what_is_not_served_is_said(method: str, suffix: str, status: int, code: str) -> None:
    stand = Stand()
    call = await create(stand, background=True).finish()
    refused = await stand.call(method, f"{PATH}/{call.json()['id']}{suffix}").finish()
    assert (refused.status, refused.json()["error"]["code"]) == (status, code)


async def test_streams_of_other_apis_are_no_responses() -> None:
    stand = Stand()
    call = stand.call(body={"model": "simulated", "prompt": "hi", "max_tokens": 1})
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"a", "length")
    stand.complete(request, 1)
    await call.finish()
    stream = call.headers[b"x-headrace-stream"].decode()
    for name in (stream, f"resp_{stream}", "resp_x"):
        found = await stand.call("GET", f"{PATH}/{name}").finish()
        assert (found.status, found.json()["error"]["code"]) == (404, "response_not_found")
