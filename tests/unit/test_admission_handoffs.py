"""Handoffs as admission as a whole decides them: what prefill, owner, record and figures are told."""

from dataclasses import replace
from typing import Any

from schemas.records import Dispatch, Dispatched, Heartbeat, Rejected
from streams.admission.actions import AnnouncePool, Assign
from streams.admission.hop import Hop
from streams.admission.metrics import Metrics
from streams.admission.router import PoolChange
from streams.admission.waiting import HandoffPolicy, WaitingPolicy
from tests.admission_harness import make_status
from tests.unit.test_admission_decisions import EPOCH, Driver
from tests.unit.test_admission_metrics import values
from tests.unit.test_admission_pairing import LAYOUT, LONG

PREFILL: dict[str, Any] = {
    "worker_role": "prefill",
    "kv_layout": LAYOUT,
    "prefill_tokens_per_s": 100_000.0,
}
DECODE: dict[str, Any] = {"worker_role": "decode", "kv_layout": LAYOUT, "num_running": 4, "max_num_seqs": 64}


def both() -> Driver:
    driver = Driver(WaitingPolicy(handoff=HandoffPolicy(reserve_ms=200, lease_ms=5_000)))
    driver.heartbeat(0, **PREFILL)
    driver.heartbeat(1, **DECODE)
    return driver


def test_prefill_hears_of_decode_and_the_owner_of_both() -> None:
    driver = both()
    request = driver.request(prompt_token_ids=LONG)
    assert driver.send(request) == [Dispatch, Dispatched]
    dispatch = driver.dispatches[0].dispatch
    pairing = dispatch.pairing
    assert pairing is not None
    assert (dispatch.slot, pairing.decode_slot, pairing.decode_epoch) == (0, 1, EPOCH)
    assert (len(pairing.transfer_id), pairing.reserve_ms, pairing.lease_ms) == (16, 200, 5_000)
    told = driver.replies[-1].record
    assert isinstance(told, Dispatched)
    assert (told.slot, told.epoch, told.prefill_slot, told.prefill_epoch) == (1, EPOCH, 0, EPOCH)
    # An owner that did not hear it hears the same again.
    assert driver.send(request) == [Dispatched]
    assert driver.replies[-1].record == replace(told, requests_offset=2)


def test_two_handoffs_of_a_request_have_two_names() -> None:
    driver = both()
    request = driver.request(prompt_token_ids=LONG)
    driver.send(request)
    request.attempt = 2
    driver.send(request)
    first, second = (assign.dispatch.pairing for assign in driver.dispatches)
    assert first is not None
    assert second is not None
    assert first.transfer_id != second.transfer_id
    assert len(driver.admission.router.reservations) == 1


def test_the_place_at_decode_ends_with_the_request_wherever_that_was_or_with_the_lease() -> None:
    driver = both()
    places = driver.admission.router.reservations
    for slot in (0, 1):
        request = driver.request(prompt_token_ids=LONG)
        driver.send(request)
        assert len(places) == 1
        driver.usage(request, slot=slot)
        assert len(places) == 0
    driver.send(driver.request(prompt_token_ids=LONG))
    driver.tick(4_999)
    assert len(places) == 1
    driver.tick(1)
    assert len(places) == 0


def test_a_dispatch_that_fails_takes_the_place_with_it() -> None:
    driver = both()
    request = driver.request(prompt_token_ids=LONG)
    driver.admission.takeover.accept(0, 1)
    (assign,) = driver.admission.on_request(request, b"", 0, 1, None, driver.now)
    assert isinstance(assign, Assign)
    assert len(driver.admission.router.reservations) == 1
    (record,) = driver.carry_out(driver.admission.on_dispatch_failed(assign, "test", driver.now))
    assert isinstance(record, Rejected)
    assert len(driver.admission.router.reservations) == 0


def test_the_decision_has_what_decided() -> None:
    driver = both()
    driver.send(driver.request(prompt_token_ids=LONG))
    driver.send(driver.request(prompt_token_ids=[1, 2]))
    far, near = driver.admission.decisions.drain()
    assert (far.slot, far.inputs["hop_taken"], far.inputs["decode_slot"]) == (0, 1.0, 1.0)
    assert (near.slot, near.inputs["hop_taken"]) == (1, 0.0)
    assert "decode_slot" not in near.inputs
    for decision, tokens in ((far, len(LONG)), (near, 2)):
        seen = Hop.from_inputs(decision.inputs)
        assert seen is not None
        assert (seen.prompt_tokens, seen.decode_streams) == (tokens, 4)
        assert driver.admission.router.policy.hop.hops(seen) is bool(decision.inputs["hop_taken"])


def test_in_a_unified_fleet_nothing_of_it_is_told() -> None:
    driver = Driver()
    driver.heartbeat(0)
    driver.heartbeat(1)
    driver.send(driver.request(prompt_token_ids=LONG))
    (decision,) = driver.admission.decisions.drain()
    assert not [name for name in decision.inputs if name.startswith(("hop_", "decode_"))]
    metrics = Metrics()
    metrics.routed(driver.admission.router)
    assert "headrace_admission_missing_pool" not in str(values(metrics))


def test_a_pool_that_is_gone_is_announced_and_counted() -> None:
    driver, metrics = both(), Metrics()
    driver.send(driver.request(prompt_token_ids=LONG))
    driver.heartbeat(1, draining=True, **DECODE)
    changes: list[PoolChange] = []

    def beat(**status: Any) -> None:
        driver.heartbeats += 1
        heartbeat = Heartbeat("worker", 1, EPOCH, b"", worker=make_status(**DECODE, **status))
        driver.admission.fleet.on_heartbeat(heartbeat, driver.heartbeats * 100)
        changes.extend(
            action.change
            for action in driver.admission.fleet_changed(driver.now)
            if isinstance(action, AnnouncePool)
        )

    beat()
    beat(draining=True)
    assert [(change.role, change.is_missing) for change in changes] == [("decode", False), ("decode", True)]
    driver.send(driver.request(prompt_token_ids=LONG))
    metrics.routed(driver.admission.router)
    found = values(metrics)
    assert found['headrace_admission_missing_pool{model="simulated",role="decode"}'] == 1
    assert found['headrace_admission_routed_requests{way="unpaired"}'] == 1
    assert found['headrace_admission_routed_requests{way="handoff"}'] == 1
