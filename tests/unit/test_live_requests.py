from typing import Any

import pytest

from schemas.records import Cancellation, Dispatch
from tests.worker_harness import make_inference_request
from workers.live_requests import End, LiveRequests
from workers.request import FinishReason

SLOT, EPOCH = 2, 50
ID = b"r" * 16


def make_live() -> LiveRequests:
    return LiveRequests(SLOT, EPOCH, "simulated", vocab_size=300)


def dispatch(attempt: int = 1, epoch: int = EPOCH, **fields: Any) -> Dispatch:
    request = make_inference_request(request_id=ID, attempt=attempt)
    for name, value in fields.items():
        setattr(request.sampling if hasattr(request.sampling, name) else request, name, value)
    return Dispatch(SLOT, epoch, 20, request)


def test_takes_a_dispatch_as_the_engine_wants_it() -> None:
    live = make_live()
    taken = live.on_dispatch(dispatch(attempt=2, output_token_ids=[7, 8]), now=5.0, traceparent="00-a-b-01")
    assert taken is not None
    request, end = taken
    assert end is None
    assert request.request.output_token_ids == [7, 8]
    assert request.request.num_resumed_tokens == request.num_output_tokens == 2
    assert request.reply_to == (ID, 2, request.request.reply_partition)
    assert (request.arrived, request.traceparent) == (5.0, "00-a-b-01")
    assert list(live) == [request]
    assert live.of(request.request) is request


@pytest.mark.parametrize("other", [dispatch(epoch=EPOCH - 1), dispatch(epoch=EPOCH + 1)])
def test_ignores_other_epochs(other: Dispatch) -> None:
    live = make_live()
    assert live.on_dispatch(other, 0) is None
    assert len(live) == 0


def test_takes_higher_attempts_only_and_remembers_what_ended() -> None:
    live = make_live()
    first = live.on_dispatch(dispatch(attempt=2), 0)
    assert first is not None
    assert live.on_dispatch(dispatch(attempt=2), 0) is None
    assert live.on_dispatch(dispatch(attempt=1), 0) is None
    second = live.on_dispatch(dispatch(attempt=3), 0)
    assert second is not None
    assert live.of(first[0].request) is None
    live.on_end(second[0], now=10)
    assert len(live) == 0
    assert live.on_dispatch(dispatch(attempt=3), 609) is None
    assert live.on_dispatch(dispatch(attempt=4), 609) is not None


def test_forgets_what_ended_after_ten_minutes() -> None:
    live = make_live()
    taken = live.on_dispatch(dispatch(), 0)
    assert taken is not None
    live.on_end(taken[0], now=0)
    assert live.on_dispatch(dispatch(), 601) is not None


def test_cancels_what_lives_and_what_comes() -> None:
    live = make_live()
    cancel = Cancellation(ID, 2, "acme", "disconnect")
    assert not live.on_cancellation(cancel, 0)
    taken = live.on_dispatch(dispatch(attempt=2), 1)
    assert taken is not None
    assert taken[1] == End(FinishReason.CANCELLED)
    live.on_end(taken[0], 1)
    taken = live.on_dispatch(dispatch(attempt=3), 2)
    assert taken is not None
    assert taken[1] is None
    assert not live.on_cancellation(cancel, 3)
    assert live.on_cancellation(Cancellation(ID, 3, "acme", "disconnect"), 3)
    assert not live.on_cancellation(Cancellation(ID, 3, "acme", "stray", SLOT, EPOCH - 1), 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, "model: this worker serves 'simulated', not 'llama'"),
        ({"priority": 3}, "priority: no class is called 3"),
        ({"prompt_token_ids": [1, 300]}, "prompt_token_ids: ids must be 0 to 299"),
        ({"output_token_ids": [-1]}, "output_token_ids: ids must be 0 to 299"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"temperature": float("nan")}, "temperature: must be 0 or more"),
        ({"temperature": float("inf")}, "temperature: must be 0 or more"),
        ({"top_p": 0.0}, "top_p: must be above 0"),
        ({"top_k": -1}, "top_k: must be 0"),
    ],
)
def test_what_would_break_the_engine_ends_with_its_field_named(fields: dict[str, Any], message: str) -> None:
    taken = make_live().on_dispatch(dispatch(**fields), 0)
    assert taken is not None
    end = taken[1]
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert message in end.message
