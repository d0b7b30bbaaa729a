from gateway.sse import KEEP_ALIVE, ChatFrames, GenerateFrames
from schemas.api.errors import ApiError
from schemas.records import Completion

COMPLETION = Completion(bytes(16), 1, 0, 5, 12, 4, 34, "stop")
ERROR = ApiError(502, "worker_lost", "gone")
RID = bytes.fromhex("000102030405060708090a0b0c0d0e0f")
HEAD = (
    b'data: {"id":"chatcmpl-000102030405060708090a0b0c0d0e0f","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"m","choices":['
)


def test_generate() -> None:
    frames = GenerateFrames()
    assert frames.first() == b""
    assert frames.text('a"\n\\\u2028é🙂', 7) == (
        'id: 7\ndata: {"type":"token","text":"a\\"\\n\\\\\u2028é🙂"}\n\n'.encode()
    )
    assert frames.done(COMPLETION) == (
        b'id: 33\ndata: {"type":"done","usage":{"input_tokens":12,"cached_tokens":4,"output_tokens":34},'
        b'"stop_reason":"stop"}\n\n'
    )
    assert frames.error(ERROR) == (
        b'data: {"type":"error","error":{"message":"gone","type":"server_error","param":null,'
        b'"code":"worker_lost"}}\n\n'
    )
    assert KEEP_ALIVE == b": keep-alive\n"


def test_chat_without_usage() -> None:
    frames = ChatFrames(RID, "m", 1_700_000_000, include_usage=False)
    assert frames.first() == b"id: -1\n" + HEAD + (
        b'{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    assert frames.text("hi\n", 0) == b"id: 0\n" + HEAD + (
        b'{"index":0,"delta":{"content":"hi\\n"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert frames.done(COMPLETION) == b"id: 33\n" + HEAD + (
        b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\nid: 33\ndata: [DONE]\n\n'
    )
    assert frames.error(ERROR) == (
        b'data: {"error":{"message":"gone","type":"server_error","param":null,"code":"worker_lost"}}\n\n'
    )


def test_chat_with_usage() -> None:
    frames = ChatFrames(RID, "m", 1_700_000_000, include_usage=True)
    assert frames.first().endswith(b'"finish_reason":null}],"usage":null}\n\n')
    assert frames.text("hi", 0) == b"id: 0\n" + HEAD + (
        b'{"index":0,"delta":{"content":"hi"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    )
    assert frames.done(COMPLETION) == b"".join(
        [
            b"id: 33\n" + HEAD,
            b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n',
            b"id: 33\n" + HEAD,
            b'],"usage":{"prompt_tokens":12,"completion_tokens":34,"total_tokens":46,',
            b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
            b"id: 33\ndata: [DONE]\n\n",
        ]
    )


def test_a_model_name_cannot_break_out_of_its_line() -> None:
    frames = ChatFrames(RID, 'm"\n\ndata: x', 0, include_usage=False)
    assert frames.text("a", 0).count(b"\n") == 3
