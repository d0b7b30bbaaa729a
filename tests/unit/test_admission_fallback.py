"""Which model serves a request under overload, as owners hear it."""

from typing import Any

import pytest

from schemas.codec import decode
from schemas.records import Admitted, Dispatch, Dispatched, Model
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.fallback import FallbackPolicy
from streams.admission.splice import encode_dispatch
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import make_tenant
from tests.unit.test_admission_decisions import DISPATCHED, T0, Driver

FULL = {"max_num_seqs": 1, "num_running": 1}


class FallbackDriver(Driver):
    """Of the model `big` with the fallbacks `small` and `tiny`, whose workers are 0, 1 and 2."""

    def __init__(self, **tenant: Any) -> None:
        super().__init__(**tenant)
        policy = FallbackPolicy({"big": ["small", "tiny"]}, wait_ms=2_000)
        self.admission = Admission(WaitingPolicy(), DecisionLog(), fallback=policy)
        self.admission.on_assigned(dict.fromkeys(range(6), 0), T0)
        self.admission.on_tenant("demo", make_tenant(**tenant), T0)

    def served_by(self) -> list[str]:
        return [reply.record.model for reply in self.replies if isinstance(reply.record, Dispatched)]

    def overload(self) -> None:
        """1,000 tokens wait for `big`, which drains 100 a second."""
        self.heartbeat(0, model="big", prefill_tokens_per_s=50.0, decode_tokens_per_s=50.0, **FULL)
        self.tick()
        waiting = self.request(model="big", prompt_token_ids=[1] * 900, max_tokens=100, allow_fallback=False)
        assert self.send(waiting) == [Admitted]


@pytest.fixture
def driver() -> FallbackDriver:
    return FallbackDriver()


def test_without_a_worker_a_fallback_serves_and_the_answer_says_which(driver: FallbackDriver) -> None:
    driver.heartbeat(1, model="small")
    request = driver.request(model="big")
    assert driver.send(request) == DISPATCHED
    assert driver.served_by() == ["small"]
    assign = driver.dispatches[-1]
    sent = decode(encode_dispatch(assign.dispatch, assign.record))
    assert isinstance(sent, Dispatch)
    assert (sent.slot, sent.request.model) == (1, "small")  # the worker runs it and bills it as its own
    assert [(d.action, d.reason, d.model) for d in driver.admission.decisions.drain()] == [
        ("fallback", "no_worker", "big"),
        ("dispatch", "room", "small"),
    ]
    assert driver.admission.fallback.num_requests == 1


def test_sent_again_it_is_told_the_model_that_serves_it(driver: FallbackDriver) -> None:
    driver.heartbeat(1, model="small")
    request = driver.request(model="big")
    driver.send(request)
    driver.heartbeat(0, model="big")
    assert driver.send(request) == [Dispatched]
    assert driver.served_by() == ["small", "small"]


def test_a_long_wait_sends_to_a_fallback_and_a_short_one_does_not(driver: FallbackDriver) -> None:
    driver.overload()
    driver.heartbeat(1, model="small")
    assert driver.send(driver.request(model="big")) == DISPATCHED
    assert driver.served_by() == ["small"]
    calm = FallbackDriver()
    calm.heartbeat(0, model="big", **FULL)
    calm.heartbeat(1, model="small")
    assert calm.send(calm.request(model="big")) == [Admitted]


def test_a_model_with_room_serves_what_names_it(driver: FallbackDriver) -> None:
    driver.heartbeat(0, model="big")
    driver.heartbeat(1, model="small")
    driver.send(driver.request(model="big"))
    assert driver.served_by() == ["big"]


def test_the_next_fallback_serves_where_the_first_has_no_room(driver: FallbackDriver) -> None:
    driver.overload()
    driver.heartbeat(1, model="small", **FULL)
    driver.heartbeat(2, model="tiny")
    driver.send(driver.request(model="big"))
    assert driver.served_by() == ["tiny"]


def test_nobody_waits_in_the_queue_of_a_fallback_or_goes_before_its_own(driver: FallbackDriver) -> None:
    driver.overload()
    driver.heartbeat(1, model="small", **FULL)
    assert driver.send(driver.request(model="big")) == [Admitted]
    assert driver.send(driver.request(model="small")) == [Admitted]
    sent = driver.heartbeat(1, model="small", max_num_seqs=2, num_running=1)
    assert [record.request.model for record in sent if isinstance(record, Dispatch)] == ["small"]


def test_who_insists_on_its_model_waits_for_it(driver: FallbackDriver) -> None:
    driver.overload()
    driver.heartbeat(1, model="small")
    assert driver.send(driver.request(model="big", allow_fallback=False)) == [Admitted]
    assert driver.send(driver.request(model="big", attempt=2, output_token_ids=[1])) == [Admitted]
    assert driver.served_by() == []


def test_what_the_tenant_may_not_use_does_not_serve_it() -> None:
    driver = FallbackDriver(allowed_models=["big", "tiny"])
    driver.heartbeat(1, model="small")
    driver.heartbeat(2, model="tiny")
    driver.send(driver.request(model="big"))
    assert driver.served_by() == ["tiny"]
    other = FallbackDriver(allowed_models=["small"])
    other.heartbeat(1, model="small")
    other.send(other.request(model="big"))
    assert other.refusal() == (403, "model_not_allowed")


def test_a_fallback_is_charged_and_settled_like_any_request(driver: FallbackDriver) -> None:
    driver.heartbeat(1, model="small")
    request = driver.request(model="big")
    driver.send(request)
    assert driver.admission.limits.num_concurrent("demo", 0) == 1
    request.model = "small"
    driver.usage(request, slot=1)
    assert driver.admission.limits.num_concurrent("demo", 0) == 0


def test_what_is_told_of_a_model_counts_before_its_settings(driver: FallbackDriver) -> None:
    fallback = driver.admission.fallback
    driver.heartbeat(1, model="small")
    driver.heartbeat(2, model="tiny")

    def served_by() -> str:
        assert driver.send(driver.request(model="big")) == DISPATCHED
        return driver.served_by()[-1]

    fallback.put("big", Model("big", ["tiny"]))
    assert served_by() == "tiny"
    fallback.put("big", None)
    assert served_by() == "small"
    fallback.put("big", Model("big"))
    assert driver.send(driver.request(model="big")) == [Admitted]
