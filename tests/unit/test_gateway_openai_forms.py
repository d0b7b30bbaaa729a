"""/v1/completions and the options of OpenAI's streams over raw ASGI: exact bytes."""

import json
from typing import Any

import pytest

from schemas.api.errors import ApiError
from schemas.records import InferenceRequest
from schemas.sampling import TokenLogprobs
from tests.gateway_factories import Call, Stand

COMPLETION = {"model": "simulated", "prompt": "hi"}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
_GONE = ApiError(503, "shutting_down", "bye")
COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"


async def asked(path: str, body: dict[str, Any]) -> tuple[Stand, Call, InferenceRequest]:
    stand = Stand()
    call = stand.call(path=path, body=body)
    request = await stand.request()
    stand.dispatched(request)
    return stand, call, request


def head(path: str, request: InferenceRequest, extra: str = "") -> str:
    prefix, kind = ("cmpl", "text_completion")
    if path == CHAT_PATH:
        prefix, kind = ("chatcmpl", "chat.completion.chunk")
    return (
        f'data: {{"id":"{prefix}-{request.request_id.hex()}","object":"{kind}",'
        f'"created":{request.accepted_at // 1000},"model":"simulated"{extra},"choices":['
    )


async def test_a_whole_completion() -> None:
    stand, call, request = await asked(COMPLETIONS_PATH, {**COMPLETION, "stop": "STOP"})
    assert (request.sampling.max_tokens, request.sampling.stop) == (16, ["STOP"])
    stand.tokens(request, 0, b"hey STOP", "stop")
    stand.complete(request, 8, "stop", text_length=4)
    assert (await call.finish()).json() == {
        "id": f"cmpl-{request.request_id.hex()}",
        "object": "text_completion",
        "created": request.accepted_at // 1000,
        "model": "simulated",
        "choices": [{"text": "hey ", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_bytes_of_a_completion_stream(include_usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    stand, call, request = await asked(COMPLETIONS_PATH, {**COMPLETION, **options})
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"a"')
    stand.tokens(request, 1, b"\nb", "length")
    stand.complete(request, 3)
    await call.finish()
    start = head(COMPLETIONS_PATH, request)
    tail = ',"index":0,"logprobs":null,"finish_reason":'
    close = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
    usage = (
        f'id: 2\n{start}],"usage":{{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
    )
    assert call.content.decode() == "".join(
        [
            f'id: 0\n{start}{{"text":"a"{tail}null{close}',
            f'id: 1\n{start}{{"text":"\\n"{tail}null{close}',
            f'id: 2\n{start}{{"text":"b"{tail}null{close}',
            f'id: 2\n{start}{{"text":""{tail}"length"{close}',
            usage if include_usage else "",
            "id: 2\ndata: [DONE]\n\n",
        ]
    )


async def test_a_failed_completion_stream_has_an_error_and_no_done() -> None:
    stand, call, request = await asked(COMPLETIONS_PATH, {**COMPLETION, "stream": True})
    stand.tokens(request, 0, b"a")
    await call.until_body(b'"a"')
    stand.serving.readers[request.request_id].on_end(_GONE)
    await call.finish()
    assert call.content.decode().endswith(
        'data: {"error":{"message":"bye","type":"overloaded_error","param":null,"code":"shutting_down"}}\n\n'
    )
    assert b"[DONE]" not in call.content


async def test_usage_in_each_chunk_if_asked() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stand, call, request = await asked(CHAT_PATH, {**CHAT, **options, "service_tier": "auto"})
    stand.tokens(request, 0, b"ab")
    await call.until_body(b'"b"')
    stand.tokens(request, 2, b"c", "length")
    stand.complete(request, 3)
    await call.finish()
    start = head(CHAT_PATH, request, ',"service_tier":"default"')
    prompt = len(b"<|user|>hi\n<|assistant|>")

    def usage(count: int, details: str = "") -> str:
        return (
            f'],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{count},'
            f'"total_tokens":{prompt + count}{details}}}}}\n\n'
        )

    def choice(delta: str, finish: str = "null") -> str:
        return f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'

    role = '{"role":"assistant","content":"","refusal":null}'
    details = ',"prompt_tokens_details":{"cached_tokens":0}'
    assert call.content.decode() == "".join(
        [
            f"id: -1\n{start}{choice(role)}{usage(0)}",
            f"id: 0\n{start}" + choice('{"content":"a"}') + usage(1),
            f"id: 1\n{start}" + choice('{"content":"b"}') + usage(2),
            f"id: 2\n{start}" + choice('{"content":"c"}') + usage(3),
            f"id: 2\n{start}" + choice("{}", '"length"') + usage(3),
            f"id: 2\n{start}{usage(3, details)}",
            "id: 2\ndata: [DONE]\n\n",
        ]
    )


async def test_the_service_tier_of_a_whole_answer() -> None:
    stand, call, request = await asked(CHAT_PATH, {**CHAT, "service_tier": "default"})
    stand.tokens(request, 0, b"a", "length")
    stand.complete(request, 1)
    assert (await call.finish()).json()["service_tier"] == "default"


def told(ids: bytes | list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5, [i, 257], [-0.5, -1.5]) for i in ids]


def entry(data: bytes) -> dict[str, Any]:
    token = {"token": data.decode("utf-8", "replace"), "logprob": -0.5, "bytes": [*data]}
    return {**token, "top_logprobs": [token, {"token": "<eos>", "logprob": -1.5, "bytes": None}]}


async def test_log_probabilities_of_a_whole_chat_answer_end_with_the_text() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": "STOP"}
    stand, call, request = await asked(CHAT_PATH, body)
    assert request.sampling.logprobs == 2
    stand.tokens(request, 0, b"a", None, told(b"a"))
    stand.tokens(request, 1, b"b STOP", "stop", told(b"b STOP"))
    stand.complete(request, 7, "stop", text_length=3)
    (choice,) = (await call.finish()).json()["choices"]
    assert choice["message"]["content"] == "ab "
    assert choice["logprobs"] == {"content": [entry(b"a"), entry(b"b"), entry(b" ")], "refusal": None}


async def test_log_probabilities_come_with_the_text_they_belong_to() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True}
    stand, call, request = await asked(CHAT_PATH, body)
    first, second = (bytes([byte]) for byte in "é".encode())
    stand.tokens(request, 0, b"a" + first, None, told(b"a" + first))
    await call.until_body(b'"content":"a"')
    stand.tokens(request, 2, [*second, 257], "stop", told([*second, 257]))
    stand.complete(request, 4, "stop")
    await call.finish()
    chunks = _choices(call)
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "a", "é", None]
    assert [chunk["logprobs"] for chunk in chunks] == [
        None,
        {"content": [entry(b"a")], "refusal": None},
        {"content": [entry(first), entry(second)], "refusal": None},
        None,
    ]


async def test_tokens_of_a_character_that_never_became_one_are_told_at_the_end() -> None:
    stand, call, request = await asked(COMPLETIONS_PATH, {**COMPLETION, "logprobs": 1, "stream": True})
    stand.tokens(request, 0, b"a", None, told(b"a"))
    await call.until_body(b'"a"')
    stand.tokens(request, 1, b"\xc3", "length", told(b"\xc3"))
    stand.complete(request, 2)
    await call.finish()
    chunks = _choices(call)
    assert [chunk["text"] for chunk in chunks] == ["a", "", ""]
    assert [chunk["logprobs"] and chunk["logprobs"]["tokens"] for chunk in chunks] == [
        ["a"],
        ["bytes:\\xc3"],
        None,
    ]
    assert chunks[1]["logprobs"]["text_offset"] == [1]


async def test_log_probabilities_of_a_whole_completion() -> None:
    stand, call, request = await asked(COMPLETIONS_PATH, {**COMPLETION, "logprobs": 2})
    stand.tokens(request, 0, b"ab", "length", told(b"ab"))
    stand.complete(request, 2)
    (choice,) = (await call.finish()).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "<eos>": -1.5}, {"b": -0.5, "<eos>": -1.5}],
        "text_offset": [0, 1],
    }


def _choices(call: Call) -> list[dict[str, Any]]:
    lines = call.content.decode().splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
