"""What admission is told of where a request shall run, and what clients are told of which model served it."""

from dataclasses import replace

import pytest

from gateway.owned_request import OwnedRequest
from schemas.api.routing import affinity_hash
from schemas.stream_state import StreamState
from tests.gateway_factories import Stand, inference_request

CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def test_hints_of_the_body_are_in_the_request() -> None:
    stand = Stand()
    call = stand.call(path=PATH, body={**CHAT, "prompt_cache_key": "k", "allow_fallback": False})
    request = await stand.request()
    assert request.affinity == affinity_hash(request.tenant, "k")
    assert request.affinity is not None
    assert not request.allow_fallback
    stand.reject(request, 503, "no_worker", 1_000)
    await call.finish()
    plain = Stand()
    call = plain.call(path=PATH, body=CHAT)
    request = await plain.request()
    assert (request.affinity, request.allow_fallback) == (None, True)
    plain.reject(request, 503, "no_worker", 1_000)
    await call.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_names_the_model_that_served_it(stream: bool) -> None:
    stand = Stand()
    call = stand.call(path=PATH, body={**CHAT, "stream": stream})
    request = await stand.request()
    assert request.model == "simulated"
    stand.dispatched(replace(request, model="small"))
    stand.tokens(request, 0, b"hi", "stop")
    stand.complete(request, 2, "stop")
    await call.finish()
    assert call.headers[b"x-headrace-model"] == b"small"
    assert b'"model":"small"' in call.content.replace(b": ", b":")
    assert b'"model":"simulated"' not in call.content.replace(b": ", b":")


def test_a_retry_goes_on_with_the_model_that_began() -> None:
    state = StreamState(bytes(16), model="small", attempt=2, token_ids=[104])
    owned = OwnedRequest(inference_request(), 0, None, state)
    owned.begin_attempt()
    assert (owned.request.model, owned.request.attempt, owned.request.output_token_ids) == ("small", 2, [104])
    never_bound = OwnedRequest(inference_request(), 0, None, StreamState(bytes(16), attempt=2))
    never_bound.begin_attempt()
    assert never_bound.request.model == "simulated"
