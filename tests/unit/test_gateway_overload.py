"""What a client may ask of an overloaded fleet, and is told by it."""

import pytest

from schemas.records import Dispatched
from tests.gateway_factories import EPOCH, WORKER_EPOCH, Stand

BODY = {"model": "simulated", "prompt": "hi", "max_tokens": 100, "priority": "free"}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_cut_short_says_so(stream: bool) -> None:
    stand = Stand()
    call = stand.call(body={**BODY, "stream": stream})
    request = await stand.request()
    record = Dispatched(request.request_id, 1, EPOCH, 0, WORKER_EPOCH, "simulated", max_tokens=2)
    stand.tell(record)
    stand.tokens(request, 0, b"ab", "length")
    owned = stand.serving.owner.open[request.request_id]
    assert owned.request.sampling.max_tokens == 2  # in attempts to come, too
    stand.complete(request, 2)
    await call.finish()
    assert call.headers[b"x-headrace-max-tokens"] == b"2"


async def test_an_answer_that_is_not_says_nothing() -> None:
    stand = Stand()
    call = stand.call(body=BODY)
    request = await stand.request()
    stand.dispatched(request)
    stand.tokens(request, 0, b"ab", "length")
    stand.complete(request, 2)
    await call.finish()
    assert b"x-headrace-max-tokens" not in call.headers


async def test_a_run_that_is_not_bound_caps_nothing() -> None:
    stand = Stand()
    call = stand.call(body=BODY)
    request = await stand.request()
    stand.dispatched(request)
    stand.tell(Dispatched(request.request_id, 1, EPOCH, 1, WORKER_EPOCH + 1, "simulated", max_tokens=2))
    assert stand.serving.owner.open[request.request_id].request.sampling.max_tokens == 100
    stand.tokens(request, 0, b"ab", "length")
    stand.complete(request, 2)
    await call.finish()


async def test_a_client_says_how_long_it_waits_for_the_first_token() -> None:
    stand = Stand()
    call = stand.call(body=BODY, headers=[(b"x-headrace-start", b"0.25")])
    request = await stand.request()
    assert request.start_ms == 250
    stand.reject(request, 429, "start_unreachable", 3_000)
    await call.finish()
    assert (call.status, call.headers[b"retry-after"]) == (429, b"3")
    bad = await stand.call(body=BODY, headers=[(b"x-headrace-start", b"soon")]).finish()
    assert bad.status == 400
    assert b"X-Headrace-Start" in bad.content
