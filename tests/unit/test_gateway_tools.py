"""Tool calls over raw ASGI: exact bytes of a stream, and the whole answer."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from schemas.offered_models import OfferedModels
from schemas.records import InferenceRequest
from tests.gateway_factories import Call, Stand
from tests.tool_model import TOOL_MODEL, WEATHER, tool_model

PATH = "/v1/chat/completions"
MODEL = tool_model()
BODY: dict[str, Any] = {
    "model": TOOL_MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": WEATHER}],
}
OUTPUT = b'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


MESSAGES = {
    "model": TOOL_MODEL,
    "max_tokens": 400,
    "messages": BODY["messages"],
    "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
}


async def asked(path: str = PATH, **changes: Any) -> tuple[Stand, Call, InferenceRequest]:
    stand = Stand()
    stand.serving.offered = OfferedModels(Path(), {TOOL_MODEL: MODEL})
    call = stand.call(path=path, body={**(BODY if path == PATH else MESSAGES), **changes})
    request = await stand.request()
    stand.dispatched(request)
    return stand, call, request


async def test_the_bytes_of_a_stream_with_a_call() -> None:
    stand, call, request = await asked(stream=True)
    cuts = [0, 2, 4, 30, OUTPUT.index(b'"Rome"') + 3, len(OUTPUT)]
    for start, end in pairwise(cuts):
        shown = len(call.sent)
        stand.tokens(request, start, OUTPUT[start:end])
        if end not in (30,):  # the name is not there yet: nothing is told
            while len(call.sent) == shown or not call.content:
                call.changed.clear()
                await call.changed.wait()
    stand.tokens(request, len(OUTPUT), [257], "stop")
    stand.complete(request, len(OUTPUT) + 1, "stop")
    await call.finish()
    events = [event for event in call.content.decode().split("\n\n") if event]
    head = (
        f'data: {{"id":"chatcmpl-{request.request_id.hex()}","object":"chat.completion.chunk",'
        f'"created":{request.accepted_at // 1000},"model":"caller","choices":['
    )
    tail = ',"logprobs":null,"finish_reason":null}]}'
    call_id = f"call_{request.request_id.hex()}0"

    def shown_as(delta: str) -> str:
        return f'{head}{{"index":0,"delta":{delta}{tail}'

    told = [event.split("\n", 1)[1] for event in events]
    begun = (
        f'{{"index":0,"id":"{call_id}","type":"function","function":{{"name":"weather","arguments":"{{"}}}}'
    )
    fixed = [
        shown_as('{"role":"assistant","content":null,"refusal":null}'),
        shown_as('{"content":"H"}'),
        shown_as('{"content":"m"}'),
        shown_as('{"content":"."}'),
        shown_as(f'{{"tool_calls":[{begun}]}}'),
    ]
    assert told[:5] == fixed
    assert told[-2:] == [
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"tool_calls"}}]}}',
        "data: [DONE]",
    ]
    pieces = [json.loads(event[6:])["choices"][0]["delta"]["tool_calls"][0] for event in told[5:-2]]
    assert all(piece.keys() == {"index", "function"} for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '"city": "Rome"}'
    assert len(pieces) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_only_looks_like_a_call_is_text(stream: bool) -> None:
    stand, call, request = await asked(stream=stream)
    output = b"<tool_call>weather(Rome)"
    stand.tokens(request, 0, output, "length")
    stand.complete(request, len(output))
    await call.finish()
    if stream:
        events = [json.loads(event.split("data: ")[1]) for event in call.content.decode().split("\n\n")[:-2]]
        deltas = [event["choices"][0] for event in events]
        assert "".join(each["delta"].get("content") or "" for each in deltas) == output.decode()
        assert deltas[-1]["finish_reason"] == "length"
    else:
        (choice,) = call.json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": output.decode(), "refusal": None}


async def test_the_calls_of_a_whole_answer() -> None:
    stand, call, _ = await asked(n=2)
    for _ in range(5):
        await asyncio.sleep(0)
    requests = [owned.request for owned in stand.outbox.sent]
    for each in requests:
        stand.dispatched(each)
        stand.tokens(each, 0, [*OUTPUT, 257], "stop")
        stand.complete(each, len(OUTPUT) + 1, "stop")
    choices = (await call.finish()).json()["choices"]
    for choice, each in zip(choices, requests, strict=True):
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hm.",
            "refusal": None,
            "tool_calls": [
                {
                    "id": f"call_{each.request_id.hex()}0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        }


def event(kind: str, event_id: int | None, **fields: Any) -> str:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\n" + ("" if event_id is None else f"id: {event_id}\n") + f"data: {data}\n\n"


async def test_the_bytes_of_a_message_with_text_and_calls() -> None:
    stand, call, request = await asked("/v1/messages", stream=True)
    prompt_tokens = len(request.prompt_token_ids)
    output = b'A<tool_call>{"name": "weather", "arguments": {}}</tool_call>' * 2
    stand.tokens(request, 0, [*output, 257], "stop")
    stand.complete(request, len(output) + 1, "stop")
    await call.finish()
    start, rest = call.content.decode().split('event: ping\ndata: {"type":"ping"}\n\n')
    assert start.startswith("event: message_start\nid: -1\n")
    assert start.count("event:") == 1  # no block is open yet
    expected, half, index = "", len(output) // 2, 0
    for turn in range(2):
        base = turn * half
        name_at = base + output.index(b": {}") + 1  # the blank before the arguments
        expected += event(
            "content_block_start", None, index=index, content_block={"type": "text", "text": ""}
        )
        expected += event("content_block_delta", base, index=index, delta={"type": "text_delta", "text": "A"})
        block = {"type": "tool_use", "id": f"toolu_{request.request_id.hex()}{turn}", "name": "weather"}
        expected += event("content_block_stop", None, index=index)
        expected += event("content_block_start", None, index=index + 1, content_block={**block, "input": {}})
        for at, piece in enumerate("{}"):
            delta = {"type": "input_json_delta", "partial_json": piece}
            expected += event("content_block_delta", name_at + 1 + at, index=index + 1, delta=delta)
        end_id = None if turn == 0 else len(output) + 1
        expected += event("content_block_stop", end_id, index=index + 1)
        index += 2
    usage = {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(output) + 1,
    }
    ended = {"stop_reason": "tool_use", "stop_sequence": None}
    expected += event("message_delta", len(output) + 1, delta=ended, usage=usage)
    expected += event("message_stop", len(output) + 1)
    assert rest == expected


@pytest.mark.parametrize("cut", [False, True])
async def test_the_blocks_of_a_whole_message(cut: bool) -> None:
    stand, call, request = await asked("/v1/messages")
    output = OUTPUT[:-20] if cut else OUTPUT
    stand.tokens(request, 0, [*output, 257], "length" if cut else "stop")
    stand.complete(request, len(output) + 1, "length" if cut else "stop")
    message = (await call.finish()).json()
    use = {
        "type": "tool_use",
        "id": f"toolu_{request.request_id.hex()}0",
        "name": "weather",
        "input": {"city": "Rome"},
    }
    assert message["content"] == [{"type": "text", "text": "Hm."}, *([] if cut else [use])]
    assert message["stop_reason"] == ("max_tokens" if cut else "tool_use")
