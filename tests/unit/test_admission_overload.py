"""Admission under overload: what is predicted, who is refused and when, what its records say."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Decision, Dispatched, InferenceRequest, Rejected
from streams.admission.actions import Announce
from streams.admission.arrival import Arrival, OverloadPolicy, capped, refusal
from streams.admission.drain_rate import DrainRate
from streams.admission.shedding import ShedLevel, ShedPolicy
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import MODEL, make_request, make_tenant
from tests.unit.test_admission_decisions import DISPATCHED, Driver

CALM: dict[str, Any] = {
    "priority": 0,
    "attempt": 1,
    "arrived_at": 1_000,
    "elapsed_ms": 0,
    "prompt_tokens": 100,
    "max_tokens": 1_000,
    "min_tokens": 0,
    "expected_output_tokens": 50,
    "start_ms": 0,
    "queued_requests": 10,
    "queued_tokens": 10_000,
    "class_wait_ms": 3_000,
    "tenant_requests": 5,
    "tenant_tokens": 5_000,
    "share": 0.5,
    "wait_correction": 1.0,
    "ahead_tokens": 10_000.0,
    "drain_tokens_per_s": 1_000.0,
    "wait_ms": 10_000.0,
    "prefill_ms": 100.0,
    "num_workers": 2,
    "kv_use": 0.9,
    "shed_level": 0,
}
POLICY = OverloadPolicy()


def refused(policy: OverloadPolicy = POLICY, **fields: Any) -> tuple[str, int | None] | None:
    found = refusal(policy, Arrival(**{**CALM, **fields}))
    return None if found is None else (found.code, found.retry_after_ms)


def test_what_cannot_begin_in_time_is_refused_at_once() -> None:
    assert refused() is None
    assert refused(start_ms=10_000) == ("start_unreachable", 1_000)  # 100 ms late: its own prefill counts
    assert refused(start_ms=10_100) is None
    assert refused(start_ms=4_000) == ("start_unreachable", 6_100)
    assert refused(start_ms=12_000, elapsed_ms=3_000) == ("start_unreachable", 1_100)
    assert refused(start_ms=4_000, attempt=2) is None
    # With nobody ahead a later try is no better.
    assert refused(start_ms=50, ahead_tokens=0.0, wait_ms=0.0) is None


def test_a_class_has_a_bound_that_its_own_prompt_does_not_count_to() -> None:
    policy = OverloadPolicy(start_ms=(10_000, 9_000, 0))
    assert refused(policy, prefill_ms=1e6) is None
    assert refused(policy, priority=1, prefill_ms=1e6) == ("start_unreachable", 1_000)
    assert refused(policy, priority=2, wait_ms=1e9) is None


def test_a_tenant_above_its_share_is_refused_while_its_class_waits() -> None:
    # 5,000 tokens at half of 1,000 a second are 10 s of its share; 2 s may wait.
    assert refused(shed_level=3) == ("over_fair_share", 8_000)
    assert refused(shed_level=2) is None
    assert refused(shed_level=3, tenant_tokens=1_000) is None
    assert refused(shed_level=3, tenant_tokens=50_000, share=1.0) is None  # it takes nothing from others
    assert refused(shed_level=3, tenant_tokens=5_000, share=1.0, priority=1) == ("over_fair_share", 3_000)
    assert refused(shed_level=3, tenant_requests=1) is None  # two at once are no flood
    assert refused(shed_level=3, class_wait_ms=900) is None  # another class waits, not this one
    assert refused(shed_level=3, priority=2) is None
    assert refused(shed_level=3, attempt=2) is None


def test_class_free_goes_last() -> None:
    assert refused(shed_level=4, priority=1, tenant_requests=0) == ("free_class_shed", 10_000)
    assert refused(shed_level=4, priority=0, tenant_requests=0) is None


def test_free_answers_are_cut_short() -> None:
    def cap(**fields: Any) -> int | None:
        return capped(ShedPolicy(), Arrival(**{**CALM, "priority": 1, "shed_level": 2, **fields}))

    assert cap() == 512
    assert cap(min_tokens=700) == 700
    for fields in ({"max_tokens": 512}, {"priority": 0}, {"attempt": 2}, {"shed_level": 1}):
        assert cap(**fields) is None


@given(
    st.fixed_dictionaries(
        {
            "priority": st.integers(0, 2),
            "attempt": st.integers(1, 3),
            "shed_level": st.integers(0, 4),
            "wait_ms": st.floats(0, 1e6),
            "start_ms": st.integers(0, 100_000),
            "tenant_tokens": st.integers(0, 100_000),
            "class_wait_ms": st.integers(0, 10_000),
            "drain_tokens_per_s": st.floats(0, 1e5),
        }
    )
)
def test_a_decision_can_be_made_again_from_its_record(fields: dict[str, Any]) -> None:
    seen = Arrival(**{**CALM, **fields})
    again = Arrival.from_inputs({**seen.inputs(), "status": 429.0})
    assert again == seen
    found = refusal(POLICY, seen)
    assert refusal(POLICY, again) == found
    if found is not None:
        assert found.status == 429
        assert 1_000 <= (found.retry_after_ms or 0) <= 60_000


def test_the_drain_rate_is_of_the_time_in_which_something_waits() -> None:
    rate = DrainRate()
    assert rate.tokens_per_s(2, 500.0) == 500.0
    for now in range(0, 60_000, 100):
        rate.served(10)  # idle: it says what was asked for
        rate.tick(False, 2, now)
    assert rate.tokens_per_s(2, 500.0) == 500.0
    for now in range(60_000, 120_000, 100):
        rate.served(200)
        rate.tick(True, 2, now)
    measured = rate.tokens_per_s(2, 500.0)
    assert 1_700 < measured < 2_000  # 2,000, and a little of the guess
    assert rate.tokens_per_s(4, 1_000.0) == pytest.approx(2 * measured)  # twice the workers


class Spike:
    """A fleet of one worker that serves `rate` requests a second, each of 26 tokens, one ms by one."""

    def __init__(self, rate: int, policy: WaitingPolicy | None = None) -> None:
        self.driver = Driver(policy)
        self.rate = rate
        self.running: list[InferenceRequest] = []
        self.dispatched = 0
        self.room = 0.0
        self.levels: list[ShedLevel] = []
        carry_out = self.driver.carry_out

        def watch(actions: list[Any]) -> list[Any]:
            self.levels += [a.change.level for a in actions if isinstance(a, Announce)]
            return carry_out([a for a in actions if not isinstance(a, Announce)])

        self.driver.carry_out = watch  # type: ignore[method-assign]
        self.driver.heartbeat(max_num_seqs=self.rate // 10, num_blocks=100_000, free_blocks=100_000)

    def tenant(self, name: str, **fields: Any) -> None:
        self.driver.admission.on_tenant(name, make_tenant(name, **fields), self.driver.now)

    def step(self, arrivals: list[InferenceRequest]) -> None:
        """100 ms: requests come, as many as the worker serves end, a heartbeat, a tick."""
        for request in arrivals:
            self.driver.send(request)
        for assign in self.driver.dispatches[self.dispatched :]:
            self.running.append(assign.dispatch.request)
        self.dispatched = len(self.driver.dispatches)
        self.driver.now += 100
        per_step = self.rate // 10
        ended, self.running = self.running[:per_step], self.running[per_step:]
        for request in ended:
            self.driver.usage(request, output=16)
        mailbox = [self.driver.mailbox] * 3
        self.driver.heartbeat(
            max_num_seqs=per_step,
            num_blocks=100_000,
            free_blocks=100_000,
            num_running=len(self.running),
            mailbox_offsets=mailbox,
            prefill_tokens_per_s=10_000.0,
            decode_tokens_per_s=10_000.0,
        )
        self.driver.tick()

    def refused(self, *tenants: str) -> list[Decision]:
        decisions = self.driver.admission.decisions.drain()
        return [d for d in decisions if d.action in ("reject", "evict") and d.tenant in tenants]


def test_paid_traffic_within_its_share_is_served_in_a_spike_that_free_traffic_makes() -> None:
    """3× for 20 s: of 200 requests a second that are served, paid ask for 150, free for 450."""
    spike = Spike(200)
    paid = [f"paid-{n}" for n in range(5)]
    free = [f"free-{n}" for n in range(5)]
    for name in paid + free:
        spike.tenant(name)
    for step in range(200):
        arrivals = [
            spike.driver.request(tenant=name, priority=0, max_tokens=16) for name in paid for _ in range(3)
        ]
        for n in range(45):
            request = spike.driver.request(tenant=free[(n + step) % 5], priority=1, max_tokens=16)
            arrivals.append(request)
        spike.step(arrivals)
    assert spike.levels[:4] == [1, 2, 3, 4]
    decisions = spike.driver.admission.decisions.drain()
    lost = [d for d in decisions if d.action in ("reject", "evict")]
    assert {d.tenant for d in lost} <= set(free)
    assert {d.reason for d in lost} == {"over_fair_share", "free_class_shed"}
    waits = [d.inputs["queued_ms"] for d in decisions if d.action == "dispatch" and d.priority == 0]
    assert max(waits) <= 200
    for _ in range(200):
        spike.step([])
    assert spike.driver.admission.overload.level(MODEL) == ShedLevel.NONE


@settings(max_examples=12, deadline=None)
@given(
    num_paid=st.integers(1, 6),
    paid_per_step=st.integers(1, 6),
    num_free=st.integers(0, 6),
    free_per_step=st.integers(0, 30),
    batch_per_step=st.integers(0, 10),
)
def test_whatever_others_do_paid_traffic_that_there_is_capacity_for_is_served(
    num_paid: int, paid_per_step: int, num_free: int, free_per_step: int, batch_per_step: int
) -> None:
    """Paid traffic triples for 3 s, to 18 of the 20 requests a step that are served at most."""
    spike = Spike(200)
    tenants = [f"paid-{n}" for n in range(num_paid)]
    for name in [*tenants, *(f"free-{n}" for n in range(num_free)), "batch"]:
        spike.tenant(name)
    for step in range(60):
        much = 3 if 20 <= step < 50 else 1
        arrivals = [spike.driver.request(tenant="batch", priority=2) for _ in range(batch_per_step)]
        free = [f"free-{n % num_free}" for n in range(free_per_step if num_free else 0)]
        paid = [tenants[(n + step) % num_paid] for n in range(much * paid_per_step)]
        arrivals += [spike.driver.request(tenant=name, priority=1) for name in free]
        arrivals += [spike.driver.request(tenant=name) for name in paid]
        spike.step(arrivals)
    decisions = [d for d in spike.driver.admission.decisions.drain() if d.tenant in tenants]
    assert {d.action for d in decisions} == {"dispatch"}
    assert max(d.inputs["queued_ms"] for d in decisions) <= 200


def test_one_tenant_at_twenty_times_its_share_is_refused_and_no_other() -> None:
    spike = Spike(200)
    others = [f"t{n}" for n in range(9)]
    for name in [*others, "flood"]:
        spike.tenant(name)
    for step in range(150):
        mine = [spike.driver.request(tenant="flood") for _ in range(40)]
        theirs = [spike.driver.request(tenant=name) for name in others] if step % 2 else []
        spike.step(mine + theirs)
    assert spike.levels[:3] == [1, 2, 3]
    assert spike.refused(*others) == []
    assert spike.driver.rejections()
    assert {r.code for r in spike.driver.rejections()} == {"over_fair_share"}


def test_waits_are_predicted_though_others_come_later_and_go_first() -> None:
    """Of 200 requests a second that are served, 150 are interactive: class free has what they leave."""
    spike = Spike(200)
    spike.tenant("paid")
    spike.tenant("free")
    for _ in range(150):
        spike.step(
            [spike.driver.request(tenant="paid") for _ in range(15)]
            + [spike.driver.request(tenant="free", priority=1) for _ in range(6)]
        )
    decisions = spike.driver.admission.decisions.drain()
    served = [d.inputs for d in decisions if d.action == "dispatch" and d.tenant == "free"][300:]
    errors = sorted(figures["wait_ms"] / figures["queued_ms"] for figures in served)
    assert len(errors) > 300
    assert 0.6 < errors[len(errors) // 2] < 1.5  # by the rate of both classes it would be a quarter
    assert errors[len(errors) // 10] > 0.4


def test_a_tenant_that_is_alone_waits_as_long_as_it_may() -> None:
    spike = Spike(50)
    spike.tenant("demo")
    for _ in range(100):
        spike.step([spike.driver.request() for _ in range(10)])
    assert spike.levels[:3] == [1, 2, 3]
    assert spike.driver.rejections() == []


def test_with_capacity_for_it_a_spike_changes_nothing() -> None:
    spike = Spike(400)
    spike.tenant("demo")
    for step in range(100):
        spike.step([spike.driver.request() for _ in range(36 if 20 <= step < 60 else 12)])
    assert spike.levels == []
    assert spike.driver.rejections() == []


def test_a_request_whose_start_cannot_be_met_is_told_when_to_try_again() -> None:
    spike = Spike(100)
    spike.tenant("demo")
    for _ in range(30):
        spike.step([spike.driver.request(max_tokens=16) for _ in range(20)])
    asks = spike.driver.request(start_ms=50)
    assert spike.driver.send(asks) == [Rejected]
    assert spike.driver.refusal() == (429, "start_unreachable")
    assert 1_000 <= (spike.driver.rejections()[-1].retry_after_ms or 0) <= 10_000
    (decision,) = [d for d in spike.driver.admission.decisions.drain() if d.request_id == asks.request_id]
    assert decision.inputs["predicted_ttft_ms"] > 50
    assert decision.inputs["start_ms"] == 50


def test_what_waits_past_its_class_bound_is_evicted() -> None:
    driver = Driver(WaitingPolicy(overload=OverloadPolicy(start_ms=(2_000, 0, 0))))
    driver.heartbeat(max_num_seqs=1, num_running=1)
    driver.send(driver.request())
    driver.send(driver.request(priority=1))
    driver.tick(1_900)
    assert driver.rejections() == []
    driver.tick(200)
    assert driver.refusal() == (503, "expired")
    assert len(driver.rejections()) == 1


def test_a_capped_answer_is_dispatched_and_reserved_as_such() -> None:
    driver = Driver()
    driver.heartbeat(max_num_seqs=1, num_running=1)
    driver.send(driver.request())
    for _ in range(12):
        driver.tick(100)
    assert driver.admission.overload.level(MODEL) == ShedLevel.CAP_FREE
    request = driver.request(priority=1, max_tokens=4_000)
    driver.send(request)
    driver.heartbeat()
    sent = driver.dispatches[-1]
    assert sent.dispatch.request.request_id == request.request_id
    assert sent.dispatch.request.sampling.max_tokens == 512
    assert sent.record == b""  # not what lies in inference.requests
    told = driver.replies[-1].record
    assert isinstance(told, Dispatched)
    assert told.max_tokens == 512
    # Its owner sends it again, as it was asked for, and hears the same.
    again = make_request(request_id=request.request_id, accepted_at=driver.now, priority=1, max_tokens=4_000)
    driver.send(again)
    heard = driver.replies[-1].record
    assert isinstance(heard, Dispatched)
    assert (heard.request_id, heard.max_tokens) == (request.request_id, 512)
    assert driver.admission.limits.reserved_tokens("demo", 1) == 10 + 512
    assert driver.admission.overload.shed[ShedLevel.CAP_FREE] == 1
    actions = [d.action for d in driver.admission.decisions.drain() if d.request_id == request.request_id]
    assert actions == ["cap", "dispatch"]


def test_predictions_are_held_against_what_came_of_them(driver: Driver) -> None:
    driver.tick(100)
    for _ in range(60):
        request = driver.request(prompt_token_ids=list(range(100)))
        assert driver.send(request) == DISPATCHED
        driver.heartbeat(mailbox_offsets=[driver.mailbox] * 3)
        driver.usage(request, first_token_ms=420)
    outcomes = list(driver.admission.overload.outcomes)
    assert (outcomes[0].predicted_ms, outcomes[0].real_ms) == (105.0, 420.0)  # 100 tokens at 1,000 a second
    assert outcomes[-1].predicted_ms == pytest.approx(420, rel=0.01)  # what was wrong was learned


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.heartbeat()
    return driver


def test_every_kind_of_decision_has_a_record(driver: Driver) -> None:
    driver.send(driver.request())
    driver.send(driver.request(attempt=2))
    driver.send(driver.request(tenant="nobody"))
    driver.heartbeat(max_num_seqs=1, num_running=1)
    driver.send(driver.request(start_ms=500))
    for _ in range(10):
        driver.tick(100)
    decisions = driver.admission.decisions.drain()
    assert {d.action for d in decisions} == {"dispatch", "requeue", "reject", "evict", "shed"}
    by = {d.action: d for d in decisions}
    assert by["shed"].reason == "pause_batch"
    assert by["dispatch"].inputs["prompt_tokens"] == 10
    assert by["evict"].inputs["queued_ms"] == 500
