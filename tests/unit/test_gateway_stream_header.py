"""x-headrace-stream: every online request says where its stream is found."""

import pytest

from gateway.public_id import hash_model
from tests.gateway_factories import Stand

HEADER = b"x-headrace-stream"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_says_where_its_stream_is(stream: bool) -> None:
    stand = Stand()
    stand.serving.reply_offset = {3: 4_711, 4: 5_000}.__getitem__
    body = {"model": "simulated", "prompt": "hi", "max_tokens": 1, "stream": stream, "stop": ["x"]}
    call = stand.call(body={**body, "priority": "free"})
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"a", "length")
    stand.complete(request, 1)
    await call.finish()
    public_id = stand.serving.public_ids.decode("acme", call.headers[HEADER].decode())
    where = (request.reply_partition, 5_000, request.request_id, 1, hash_model("simulated"), True, False, "")
    assert tuple(public_id) == where


async def test_a_refusal_of_what_was_asked_has_an_id_but_a_bad_body_has_none() -> None:
    stand = Stand()
    call = stand.call(body={"model": "simulated", "prompt": "hi"})
    stand.reject(await stand.request(), 429, "rate_limit_exceeded", None)
    assert HEADER in (await call.finish()).headers
    assert HEADER not in (await stand.call(body={}).finish()).headers
