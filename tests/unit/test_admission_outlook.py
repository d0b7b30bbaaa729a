"""What is predicted of a request in fleets with roles: by the slots that it would go to, not by all."""

from typing import Any

import pytest

from schemas.fleet import Member
from schemas.records import InferenceRequest
from streams.admission.hop import handoff_ms
from streams.admission.pairing import Route
from streams.admission.router import Blocked, Router
from tests.admission_harness import MODEL, make_request
from tests.unit.test_admission_decisions import Driver
from tests.unit.test_admission_handoffs import DECODE, PREFILL
from tests.unit.test_admission_pairing import LONG, decode, prefill, route, router_of
from tests.unit.test_admission_router import member

# 600 tokens take 60 ms, and a step 10.
RATE: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0, "step_time_ms": 10.0}
QUEUE: dict[str, Any] = {"num_waiting": [5, 0, 0], "queued_prefill_tokens": 1_000}


def long(**fields: Any) -> InferenceRequest:
    return make_request(prompt_token_ids=LONG, **fields)


def test_a_long_prompt_waits_in_the_queue_of_prefill_and_for_its_handoff() -> None:
    # So many streams would be held up that it goes to prefill in spite of what waits there.
    router = router_of(prefill(0, **QUEUE, **RATE), decode(1, **RATE, num_running=60))
    found = route(router)
    assert found.decode is not None
    assert found.seen is not None
    # By the decode slot, where no prompt waits, it would be 76 ms.
    expected = (1_000 + 600) / 10 + 10 + handoff_ms(router.policy.hop, found.seen)
    assert router.prefill_ms(long()) == pytest.approx(expected)
    slow = router_of(prefill(0, transfer_bytes_per_s=1e9, **RATE), decode(1, **RATE, num_running=30))
    # 79 MB over 1 GB/s, which computing in 60 ms hides all but 20 of.
    visible = 78.6 - 60 * 31 / 32
    assert slow.prefill_ms(long()) == pytest.approx(60 + 10 + visible + 5, abs=0.2)


def test_a_short_prompt_waits_where_it_is_decoded() -> None:
    router = router_of(prefill(0, **QUEUE, **RATE), decode(1, **RATE))
    # Four sequences run there, each with a token before those of the prompt.
    assert router.prefill_ms(make_request(prompt_token_ids=[1] * 10)) == pytest.approx(1 + 0.4 + 10)
    assert router.prefill_ms(long()) == pytest.approx(60 + 0.4 + 10)


def test_of_a_mixed_fleet_the_soonest_counts_and_of_one_pool_alone_all() -> None:
    pair = [prefill(0, **QUEUE, **RATE), decode(1, **RATE)]
    assert router_of(*pair, member(2, **RATE)).prefill_ms(long()) == pytest.approx(70)
    assert router_of(pair[1]).prefill_ms(long()) == pytest.approx(70.4)
    assert router_of(*pair, enabled=False).prefill_ms(long()) == pytest.approx(70.4)  # as if all were unified
    unmeasured = {"prefill_tokens_per_s": 0.0}
    assert router_of(prefill(0, **unmeasured), decode(1, **unmeasured)).prefill_ms(long()) is None
    assert Router().prefill_ms(long()) is None


@pytest.mark.parametrize(
    "members",
    [
        [prefill(0), decode(1)],
        [prefill(0, num_running=8), decode(1)],
        [prefill(0, num_running=8), decode(1, num_running=0)],
        [prefill(0), decode(1, free_blocks=0)],
        [prefill(0, free_blocks=0), decode(1, free_blocks=0)],
        [prefill(0), decode(1), member(2, free_blocks=0)],
        [prefill(0, free_blocks=0), member(2)],
        [member(2, free_blocks=0)],
    ],
)
@pytest.mark.parametrize("spill", [False, True])
def test_there_is_room_where_it_would_be_dispatched(members: list[Member], spill: bool) -> None:
    router = router_of(*members, spill=spill)
    for request in (long(), make_request()):
        assert router.has_room(request, 16) is isinstance(router.route(request, 16), Route)


def test_rates_are_those_of_what_each_worker_is_for() -> None:
    rates: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0, "decode_tokens_per_s": 500.0}
    router = router_of(prefill(0, **rates), decode(1, **rates), decode(2, **rates))
    assert router.tokens_per_s(MODEL) == 10_000 + 2 * 500
    router.update([prefill(0, **rates), decode(1, **rates), member(2, **rates)])
    assert router.tokens_per_s(MODEL) == 10_000 + 500 + 10_500
    router.update([decode(1, **rates)])
    assert router.tokens_per_s(MODEL) == 10_500


def test_kv_is_full_where_answers_are_held() -> None:
    router = router_of(prefill(0), decode(1, free_blocks=50))
    assert router.kv_use(MODEL) == pytest.approx(0.95)
    router.update([prefill(0), decode(1, free_blocks=50), member(2)])
    assert router.kv_use(MODEL) == pytest.approx(0.475)
    router.update([prefill(0, free_blocks=100)])
    assert router.kv_use(MODEL) == pytest.approx(0.9)


def test_a_start_that_the_prefill_pool_cannot_meet_is_refused_though_decode_is_idle() -> None:
    driver = Driver()
    rate = {"prefill_tokens_per_s": 1_000.0}
    driver.heartbeat(0, **{**PREFILL, **rate, "num_running": 8})
    driver.heartbeat(1, **{**DECODE, **rate, "num_running": 60})
    driver.admission.overload.update(driver.now)
    arrival = driver.admission.overload.arrival(long(), 16, 1.0, driver.now)
    # It has to wait for a place at prefill, and 600 tokens take it 600 ms.
    assert driver.admission.router.route(long(), 16) is Blocked.NO_ROOM
    assert arrival.ahead_tokens == 616
    assert arrival.prefill_ms > 600


def test_the_prediction_at_dispatch_has_the_handoff_in_it() -> None:
    driver = Driver()
    driver.heartbeat(0, **PREFILL)
    driver.heartbeat(1, **DECODE)
    driver.send(driver.request(prompt_token_ids=LONG))
    (decision,) = driver.admission.decisions.drain()
    assert decision.inputs["hop_taken"] == 1.0
    # 600 tokens at 100,000 a second, a step, and two records.
    status = driver.admission.router.workers(MODEL)[0].status
    assert decision.inputs["worker_prefill_ms"] == pytest.approx(6.0 + status.step_time_ms + 5.0)
    assert decision.inputs["prefill_ms"] == pytest.approx(decision.inputs["worker_prefill_ms"])
