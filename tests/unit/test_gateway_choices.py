"""Several choices in one answer over raw ASGI: exact bytes, and all or none."""

import asyncio
import json
from typing import Any

import pytest

from gateway.actions import Announce, Bill, Cancel, Reply
from gateway.idempotency import key_of
from schemas.api.choices import choice_request_id, choice_seed
from schemas.records import Cancellation, InferenceRequest
from tests.gateway_factories import Call, Stand

CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "n": 2}
PROMPT_TOKENS = len(b"<|user|>hi\n<|assistant|>")
PROMPTS = {"model": "simulated", "prompt": ["ab", "c"]}


async def asked(stand: Stand, path: str, body: dict[str, Any]) -> tuple[Call, list[InferenceRequest]]:
    call = stand.call(path=path, body=body)
    await stand.request()
    for _ in range(5):
        await asyncio.sleep(0)
    return call, [owned.request for owned in stand.outbox.sent]


def cancelled(stand: Stand) -> dict[bytes, str]:
    found = [action.record for action in stand.outbox.actions if isinstance(action, Cancel)]
    return {record.request_id: record.reason for record in found}


def bills(stand: Stand) -> dict[bytes, tuple[int, int]]:
    """The sealed rows: (input tokens, output tokens)."""
    rows = [action.record for action in stand.outbox.actions if isinstance(action, Bill)]
    return {row.request_id: (row.input_tokens, row.output_tokens) for row in rows}


def head(request: InferenceRequest) -> str:
    return (
        f'data: {{"id":"chatcmpl-{request.request_id.hex()}","object":"chat.completion.chunk",'
        f'"created":{request.accepted_at // 1000},"model":"simulated","choices":['
    )


def choice(index: int, delta: str, finish: str = "null") -> str:
    return f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'


def usage(prompt: int, output: int, details: str = "") -> str:
    return (
        f'"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output},'
        f'"total_tokens":{prompt + output}{details}}}'
    )


async def test_the_bytes_of_two_choices_in_one_stream() -> None:
    stand = Stand()
    options = {"stream": True, "stream_options": {"include_usage": True}, "seed": 7}
    call, requests = await asked(stand, CHAT_PATH, {**CHAT, **options})
    a, b = requests
    assert b.request_id == choice_request_id(a.request_id, 1)
    assert [each.sampling.seed for each in requests] == [7, choice_seed(7, 1)]
    stand.dispatched(a)
    await asyncio.sleep(0)
    assert not call.sent  # the other may still be refused
    stand.dispatched(b)
    await call.until_started()
    streams = [stand.serving.public_id(each) for each in requests]
    assert call.headers[b"x-headrace-stream"].decode() == ", ".join(streams)
    assert call.headers[b"x-request-id"].decode() == a.request_id.hex()
    stand.tokens(b, 0, b"x")
    await call.until_body(b'"x"')
    stand.tokens(a, 0, b"y", "length")
    stand.complete(a, 1)
    await call.until_body(b'"length"')
    stand.tokens(b, 1, b"z")
    stand.tokens(b, 2, [257], "stop")
    stand.complete(b, 3, "stop")
    await call.finish()
    start = head(a)
    role = '{"role":"assistant","content":"","refusal":null}'
    close = '],"usage":null}\n\n'
    details = ',"prompt_tokens_details":{"cached_tokens":0}'
    assert call.content.decode() == "".join(
        [
            f"id: -1\n{start}{choice(0, role)}{close}",
            f"id: -1\n{start}{choice(1, role)}{close}",
            f"id: 0\n{start}" + choice(1, '{"content":"x"}') + close,
            f"id: 0\n{start}" + choice(0, '{"content":"y"}') + close,
            f"id: 0\n{start}" + choice(0, "{}", '"length"') + close,
            f"id: 1\n{start}" + choice(1, '{"content":"z"}') + close,
            f"id: 2\n{start}" + choice(1, "{}", '"stop"') + close,
            f"{start}],{usage(2 * PROMPT_TOKENS, 4, details)}}}\n\n",
            "data: [DONE]\n\n",
        ]
    )
    assert stand.outbox.actions == []
    assert stand.serving.owner.open == {}


async def test_what_has_come_of_all_choices_is_one_write() -> None:
    stand = Stand()
    call, (a, b) = await asked(stand, CHAT_PATH, {**CHAT, "stream": True})
    for request in (a, b):
        stand.dispatched(request)
        stand.tokens(request, 0, b"x", "length")
        stand.complete(request, 1)
    await call.finish()
    assert len(call.sent) == 3  # status, roles, all else
    assert call.content.count(b'"content":"x"') == 2


async def test_usage_as_it_goes_is_that_of_all_choices() -> None:
    stand = Stand()
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    call, (a, b) = await asked(stand, "/v1/completions", {**PROMPTS, **options})
    for request in (a, b):
        stand.dispatched(request)
    stand.tokens(a, 0, b"xy")
    await call.until_body(b'"y"')
    stand.tokens(b, 0, b"z", "length")
    stand.complete(b, 1)
    await call.until_body(b'"length"')
    stand.tokens(a, 2, b"w", "length")
    stand.complete(a, 3)
    await call.finish()
    events = [
        json.loads(line[6:]) for line in call.content.decode().split("\n") if line.startswith("data: {")
    ]
    told = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events]
    assert told == [(5, 1), (5, 2), (5, 3), (5, 3), (5, 4), (5, 4), (5, 4)]
    assert [event["choices"][0]["index"] for event in events[:-1]] == [0, 0, 1, 1, 0, 0]


async def test_a_whole_answer_has_all_choices() -> None:
    stand = Stand()
    call, (a, b) = await asked(stand, "/v1/completions", PROMPTS)
    assert [each.prompt_token_ids for each in (a, b)] == [[256, *b"ab"], [256, *b"c"]]
    for request, text in ((b, b"!"), (a, b"hey")):
        stand.dispatched(request)
        stand.tokens(request, 0, text, "length")
        stand.complete(request, len(text))
    answer = (await call.finish()).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "hey"), (1, "!")]
    assert answer["id"] == f"cmpl-{a.request_id.hex()}"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 4
    assert len(call.headers[b"x-headrace-stream"].split(b", ")) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_one_refusal_refuses_all_stops_the_others_and_costs_nothing(stream: bool) -> None:
    stand = Stand()
    call, requests = await asked(stand, CHAT_PATH, {**CHAT, "n": 4, "stream": stream})
    ended, runs, refused, waits = requests
    for request in (ended, runs):
        stand.dispatched(request)
        stand.tokens(request, 0, b"x")
    stand.complete(ended, 1)  # too early to be told
    stand.reject(refused, 429, "token_rate_exceeded", 2_300)
    await call.finish()
    assert call.status == 429
    assert call.headers[b"retry-after"] == b"3"
    assert cancelled(stand) == {r.request_id: "token_rate_exceeded" for r in (runs, waits)}
    assert not stand.serving.readers
    assert bills(stand) == {ended.request_id: (0, 0)}
    words = [a.record for a in stand.outbox.actions if isinstance(a, Announce)]
    assert {word.request_id for word in words} == {r.request_id for r in (ended, runs, waits)}
    assert all(isinstance(word, Cancellation) and word.waived for word in words)
    stand.complete(runs, 1, "cancelled")
    stand.reject(waits, 499, "cancelled", None)
    assert bills(stand) == {r.request_id: (0, 0) for r in (ended, runs, waits)}
    assert stand.serving.owner.open == {}


async def test_a_refusal_frees_the_keys_of_all_choices() -> None:
    stand = Stand()
    headers = [(b"idempotency-key", b"abc")]
    call = stand.call(path=CHAT_PATH, body={**CHAT, "n": 4}, headers=headers)
    await stand.request()
    ended, runs, refused, waits = (owned.request for owned in stand.outbox.sent)
    for request in (ended, runs):
        stand.dispatched(request)
    stand.complete(ended, 0, "stop")
    stand.reject(refused, 429, "token_rate_exceeded", 2_300)  # its own key is free by admission's own word
    await call.finish()
    sent = [action for action in stand.outbox.actions if isinstance(action, Cancel)]
    assert {action.record.request_id: action.record.key for action in sent} == {
        request.request_id: key_of("acme", b"abc", index)
        for index, request in ((0, ended), (1, runs), (3, waits))
    }
    assert all(action.record.waived and action.behind_request for action in sent)


async def test_choices_that_ran_until_one_failed_are_billed() -> None:
    stand = Stand()
    call, (a, b) = await asked(stand, CHAT_PATH, CHAT)
    for request in (a, b):
        stand.dispatched(request)
        stand.tokens(request, 0, b"x")
    stand.complete(b, 1, "error")
    stand.tell(next(action.record for action in stand.outbox.actions if isinstance(action, Reply)))
    await call.finish()
    assert call.status == 500
    stand.complete(a, 1, "cancelled")
    assert bills(stand) == {b.request_id: (PROMPT_TOKENS, 1)}  # of the other the worker's own row is true


async def test_the_prompt_outlives_the_choice_that_ended_first() -> None:
    stand = Stand()
    call, (a, b) = await asked(stand, CHAT_PATH, CHAT)
    stand.dispatched(a)
    stand.tokens(a, 0, b"x", "length")
    stand.complete(a, 1)
    assert len(b.prompt_token_ids) == PROMPT_TOKENS
    call.disconnect()
    await call.finish()


async def test_a_choice_that_fails_ends_the_stream_with_an_error() -> None:
    stand = Stand()
    headers = [(b"x-headrace-detach", b"30")]
    call = stand.call(path=CHAT_PATH, body={**CHAT, "stream": True}, headers=headers)
    await stand.request()
    a, b = (owned.request for owned in stand.outbox.sent)
    stand.dispatched(a)
    stand.dispatched(b)
    stand.tokens(a, 0, b"x")
    await call.until_body(b'"x"')
    stand.reject(b, 503, "dispatch_failed", None)
    # Bound already, so admission's word does not count; what a worker says does.
    stand.complete(b, 0, "error")
    failed = stand.outbox.actions[0].record  # type: ignore[union-attr]
    stand.tell(failed)
    await call.finish()
    assert b"[DONE]" not in call.content
    assert call.content.decode().split("\n\n")[-2].startswith('data: {"error":{"message":"')
    assert cancelled(stand)[a.request_id] == "engine_error"  # whatever its detach time


@pytest.mark.parametrize("phase", ["queued", "running"])
async def test_a_disconnect_stops_all_choices(phase: str) -> None:
    stand = Stand()
    call, requests = await asked(stand, CHAT_PATH, {**CHAT, "stream": True})
    if phase == "running":
        for request in requests:
            stand.dispatched(request)
        stand.tokens(requests[0], 0, b"x", "length")
        stand.complete(requests[0], 1)
        await call.until_body(b'"length"')
    call.disconnect()
    await call.finish()
    left = requests if phase == "queued" else requests[1:]
    assert cancelled(stand) == {request.request_id: "disconnected" for request in left}


async def test_a_broker_that_does_not_take_one_refuses_all() -> None:
    stand = Stand()
    stand.outbox.error = TimeoutError()
    call = await stand.call(path=CHAT_PATH, body=CHAT).finish()
    assert (call.status, call.json()["error"]["code"]) == (503, "broker_unavailable")
    assert len(cancelled(stand)) == 2
