"""A stream over raw ASGI: exact bytes, and a client that leaves or reads slowly in every phase."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gateway import stream_writer
from gateway.actions import Cancel
from gateway.exchange import Message
from schemas.api.errors import ApiError
from schemas.records import InferenceRequest
from tests.gateway_factories import MODEL, Call, Stand

PROMPT = {"model": "simulated", "prompt": "hi", "max_tokens": 8}
STREAM = {**PROMPT, "stream": True}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def cancels(stand: Stand) -> Iterator[Cancel]:
    return (action for action in stand.outbox.actions if isinstance(action, Cancel))


async def test_the_bytes_of_a_stream() -> None:
    stand = Stand()
    call = stand.call(body=STREAM)
    request = await stand.request()
    await asyncio.sleep(0)
    assert not call.sent  # a refusal could still be a real status
    stand.dispatched(request)
    await call.until_started()
    assert call.status == 200
    assert call.headers[b"x-request-id"].decode() == request.request_id.hex()
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"a"')
    stand.tokens(request, 1, "é".encode()[:1])  # no broken character is sent
    stand.tokens(request, 2, "é".encode()[1:])
    stand.tokens(request, 3, b"b")  # what came while the client was busy is one write
    stand.tokens(request, 4, [257], "stop")  # an end token is counted, not shown
    stand.complete(request, 5, "stop")
    await call.finish()
    assert (
        call.content
        == (
            'id: 0\ndata: {"type":"token","text":"a"}\n\n'
            'id: 2\ndata: {"type":"token","text":"é"}\n\n'
            'id: 3\ndata: {"type":"token","text":"b"}\n\n'
            'id: 4\ndata: {"type":"done","usage":{"input_tokens":3,"cached_tokens":0,"output_tokens":5},'
            '"stop_reason":"stop"}\n\n'
        ).encode()
    )
    assert [message.get("more_body", False) for message in call.sent[1:]] == [True, False]
    assert stand.outbox.actions == []
    assert stand.serving.owner.open == {}


async def test_a_stop_string_and_what_follows_it_are_never_shown() -> None:
    stand = Stand()
    call = stand.call(body={**STREAM, "stop": ["STOP"]})
    request = await stand.request()
    assert request.sampling.stop == ["STOP"]
    stand.dispatched(request)
    stand.tokens(request, 0, "aé".encode())
    await call.until_body("é".encode())
    shown = call.content
    stand.tokens(request, 3, b"b STOPc", "stop")  # told at once: what was held back, and what ended it
    for _ in range(5):
        await asyncio.sleep(0)
    assert call.content == shown
    stand.complete(request, 10, "stop", text_length=4)
    await call.finish()
    usage = '"usage":{"input_tokens":3,"cached_tokens":0,"output_tokens":10}'
    assert (
        call.content
        == (
            'id: 0\ndata: {"type":"token","text":"a"}\n\n'
            'id: 2\ndata: {"type":"token","text":"é"}\n\n'
            'id: 9\ndata: {"type":"token","text":"b "}\n\n'
            'id: 9\ndata: {"type":"done",' + usage + ',"stop_reason":"stop"}\n\n'
        ).encode()
    )


async def test_an_end_token_of_a_request_with_stop_strings_is_not_shown() -> None:
    stand = Stand()
    call = stand.call(body={**STREAM, "stop": "STOP"})
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, [*b"hi ST", 257], "stop")
    stand.complete(request, 6, "stop")
    await call.finish()
    assert re.findall(rb'^id: (\d+)\ndata: {"type":"token","text":"(.)"', call.content, re.M) == [
        (b"%d" % position, bytes([char])) for position, char in enumerate(b"hi ST")
    ]
    assert b'\n\nid: 5\ndata: {"type":"done"' in call.content


async def test_a_whole_answer_is_cut_before_the_stop_string() -> None:
    stand = Stand()
    call = stand.call(path="/v1/chat/completions", body={**CHAT, "stream": False, "stop": "STOP"})
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"hey STOP", "stop")
    stand.complete(request, 8, "stop", text_length=4)
    answer = (await call.finish()).json()
    assert answer["choices"][0]["message"]["content"] == "hey "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8


async def test_the_bytes_of_a_chat_stream() -> None:
    stand = Stand()
    call = stand.call(path="/v1/chat/completions", body=CHAT)
    request = await stand.request()
    stand.tokens(request, 0, b"a", "length")  # tokens may overtake Dispatched
    stand.dispatched(request)
    stand.complete(request, 1)
    await call.finish()
    head = b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":%d,"model":"simulated",' % (
        request.request_id.hex().encode(),
        request.accepted_at // 1000,
    )
    tail = b'"logprobs":null,"finish_reason":'
    first = b'"choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},'
    assert call.content == b"".join(
        [
            b"id: -1\n" + head + first + tail + b"null}]}\n\n",
            b"id: 0\n" + head + b'"choices":[{"index":0,"delta":{"content":"a"},' + tail + b"null}]}\n\n",
            b"id: 0\n" + head + b'"choices":[{"index":0,"delta":{},' + tail + b'"length"}]}\n\n',
            b"id: 0\ndata: [DONE]\n\n",
        ]
    )


async def test_a_whole_chat_answer() -> None:
    stand = Stand()
    call = stand.call(path="/v1/chat/completions", body={**CHAT, "stream": False})
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"hey")
    stand.tokens(request, 3, [257], "stop")
    stand.complete(request, 4, "stop")
    answer = (await call.finish()).json()
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hey", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 4
    assert call.headers[b"openai-processing-ms"].isdigit()


async def test_a_long_prompt_is_tokenized_off_the_loop() -> None:
    stand = Stand(inline_body_bytes=10)
    call = stand.call(body=PROMPT)
    request = await stand.request()
    assert request.prompt_token_ids == [256, *b"hi"]
    stand.reject(request, 429, "rate_limit_exceeded", None)
    await call.finish()


async def leave_in_the_queue(stand: Stand, call: Call, request: InferenceRequest) -> None:
    pass


async def leave_at_dispatched(stand: Stand, call: Call, request: InferenceRequest) -> None:
    stand.dispatched(request)
    await asyncio.sleep(0)


async def leave_in_the_stream(stand: Stand, call: Call, request: InferenceRequest) -> None:
    stand.dispatched(request)
    stand.tokens(request, 0, b"abc")
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("phase", [leave_in_the_queue, leave_at_dispatched, leave_in_the_stream])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
async def test_a_client_that_leaves_cancels(phase: Any, body: object) -> None:
    stand = Stand()
    call = stand.call(body=body)
    request = await stand.request()
    await phase(stand, call, request)
    call.disconnect()
    await call.finish()
    (cancel,) = cancels(stand)
    assert cancel.record.request_id == request.request_id
    assert (cancel.record.attempt, cancel.record.slot, cancel.record.tenant) == (1, None, "acme")
    # Admission must hear of it as long as no worker has the request.
    assert cancel.behind_request == (phase is leave_in_the_queue)
    assert stand.serving.readers == {}
    assert list(stand.serving.owner.open) == [request.request_id]
    count = 3 if phase is leave_in_the_stream else 0
    stand.complete(request, count, "cancelled")
    assert stand.serving.owner.open == {}
    assert len(stand.outbox.actions) == 1


async def test_a_client_that_leaves_before_its_body_is_there_sends_nothing() -> None:
    stand = Stand()
    call = stand.call(body=STREAM, hang=True)
    await asyncio.sleep(0.01)
    call.disconnect()
    await call.finish()
    assert call.sent == []
    assert stand.outbox.sent == []


async def test_a_client_that_leaves_while_kafka_acks_cancels() -> None:
    stand = Stand()
    stand.outbox.error = TimeoutError()
    call = stand.call(body=STREAM)
    await call.finish()
    # Not acked is not the same as not there: what may arrive later is cancelled behind it.
    (cancel,) = cancels(stand)
    assert (cancel.record.reason, cancel.behind_request) == ("broker_unavailable", True)


async def test_a_long_queue_starts_the_stream_with_comments() -> None:
    stand = Stand(start_wait_s=10.0, keep_alive_s=4.0)
    call = stand.call(body=STREAM)
    request = await stand.request()
    now = time.monotonic()
    for later, comments in ((9.5, 0), (10.1, 1), (13.0, 1), (14.2, 2)):
        stand.serving.owner.tick(stand.serving.view, request.accepted_at, now + later)
        await asyncio.sleep(0.01)
        assert call.content.count(b": keep-alive\n") == comments
    stand.reject(request, 429, "rate_limit_exceeded", 1_000)
    await call.finish()
    assert call.status == 200
    assert re.fullmatch(
        rb'(: keep-alive\n){2}data: \{"type":"error","error":\{.*"code":"rate_limit_exceeded"\}\}\n\n',
        call.content,
    )


class SlowClient(Call):
    """Takes the head of the response, then nothing until `read` is set."""

    read: asyncio.Event

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if len(self.sent) > 1:
            await self.read.wait()


class HandWriter:
    """A connection that takes what it is given at once, unless it is not ready."""

    def __init__(self) -> None:
        self.ready = True
        self.written: list[bytes] = []

    def write(self, body: bytes) -> None:
        assert self.ready
        assert body
        self.written.append(body)


async def test_text_is_written_where_its_tokens_come_in() -> None:
    stand, writer = Stand(), HandWriter()
    call = stand.call(body=STREAM, extra_scope={stream_writer.KEY: writer})
    request = await stand.request()
    stand.dispatched(request)
    await call.until_started()
    await asyncio.sleep(0)
    stand.tokens(request, 0, b"ab")
    assert writer.written == [
        b'id: 0\ndata: {"type":"token","text":"a"}\n\nid: 1\ndata: {"type":"token","text":"b"}\n\n'
    ]
    stand.tokens(request, 2, b"\xc3")  # no whole character: nothing to write
    writer.ready = False  # the client reads slowly: its handler waits for it
    stand.tokens(request, 3, b"\xa9")
    stand.tokens(request, 4, b"c")
    assert len(writer.written) == 1
    await call.until_body("é".encode())
    writer.ready = True
    await asyncio.sleep(0)
    stand.tokens(request, 5, b"d", "length")
    assert len(writer.written) == 2
    stand.complete(request, 6)
    await call.finish()
    assert call.content.startswith(
        'id: 3\ndata: {"type":"token","text":"é"}\n\nid: 4\ndata: {"type":"token","text":"c"}\n\n'.encode()
    )
    assert b'"text":"d"' in writer.written[1]
    assert call.content.endswith(b'"stop_reason":"length"}\n\n')


async def test_many_tokens_at_once_are_left_to_the_handler() -> None:
    stand, writer = Stand(), HandWriter()
    call = stand.call(body={**STREAM, "max_tokens": 2_000}, extra_scope={stream_writer.KEY: writer})
    request = await stand.request()
    stand.dispatched(request)
    await call.until_started()
    await asyncio.sleep(0)
    stand.tokens(request, 0, b"x" * 1_000, "length")
    stand.complete(request, 1_000)
    await call.finish()
    text = b"".join(writer.written) + call.content
    assert text.count(b'"text":"x"') == 1_000
    assert [int(i) for i in re.findall(rb"id: (\d+)\ndata: {\"type\":\"token\"", text)] == list(range(1_000))


async def slow_call(stand: Stand) -> tuple[SlowClient, InferenceRequest]:
    call = SlowClient(stand.app, "POST", "/v1/generate", body=STREAM)
    call.read = asyncio.Event()
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"x")
    await call.until_body(b'"x"')
    return call, request


async def test_a_slow_reader_gets_every_token_in_few_writes() -> None:
    stand = Stand()
    call, request = await slow_call(stand)
    text = bytes(97 + i % 26 for i in range(20_000))
    for i in range(1, len(text)):
        stand.tokens(request, i, text[i : i + 1])
    stand.complete(request, len(text))
    assert stand.serving.owner.open == {}  # it holds up no end and no bill
    call.read.set()
    await call.finish()
    assert b"".join(re.findall(rb'"text":"([a-z])"', call.content)) == b"x" + text[1:]
    writes = [message["body"] for message in call.sent[1:]]
    assert len(writes) < 100
    assert max(map(len, writes)) < 20_000  # what a connection buffers, for the turn of the others


async def test_a_reader_that_never_reads_holds_nothing_for_ever() -> None:
    stand = Stand(write_timeout_s=30.0)
    call, request = await slow_call(stand)
    stand.tokens(request, 1, b"y")
    now = time.monotonic()
    for later in (0.0, 29.0):
        stand.serving.owner.tick(stand.serving.view, request.accepted_at, now + later)
        await asyncio.sleep(0.01)
        assert not call.task.done()
    stand.serving.owner.tick(stand.serving.view, request.accepted_at, now + 30.1)
    await call.finish()
    assert [cancel.record.reason for cancel in cancels(stand)] == ["disconnected"]
    assert stand.serving.readers == {}


async def test_a_shutdown_ends_streams_with_an_error_event() -> None:
    stand = Stand()
    call = stand.call(body=STREAM)
    request = await stand.request()
    stand.dispatched(request)
    await call.until_started()
    stand.serving.end_all(ApiError(503, "shutting_down", "bye"), "shutting_down")
    await call.finish()
    assert b'"code":"shutting_down"' in call.content
    assert [cancel.record.reason for cancel in cancels(stand)] == ["shutting_down"]


@pytest.mark.parametrize("given", [b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"nonsense"])
async def test_a_trace_is_passed_on_if_it_is_one(given: bytes) -> None:
    stand = Stand()
    call = stand.call(body=PROMPT, headers=[(b"traceparent", given)])
    request = await stand.request()
    passed = stand.outbox.sent[-1].traceparent
    assert passed == (None if given == b"nonsense" else given.decode())
    stand.reject(request, 429, "rate_limit_exceeded", None)
    await call.finish()


async def test_the_models() -> None:
    stand = Stand()
    listed = (await stand.call("GET", "/v1/models").finish()).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("simulated", "model", "headrace")
    assert (await stand.call("GET", "/v1/models/simulated").finish()).json() == model
    assert MODEL.spec.max_model_len == model["max_model_len"]


async def test_health() -> None:
    stand = Stand()
    assert (await stand.call("GET", "/health/live", key=None).finish()).status == 200
    call = await stand.call("GET", "/health/ready", key=None).finish()
    assert call.status == 503
    assert call.json()["reasons"] == [
        "its own heartbeats do not come back from Kafka",
        "no admission is heard",
        "no worker is heard",
    ]
