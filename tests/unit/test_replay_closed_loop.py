"""`headrace replay --closed-loop`: a recorded minute with the load that each policy makes for itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.replay.closed_loop import ClosedLoop
from infra.replay.command import carried_forward
from infra.replay.comparison import compare
from infra.replay.policy import Candidate, ShippedPolicy
from infra.replay.recording import Recording
from infra.simulator.scenario_file import parse_scenario
from infra.simulator.simulation import Simulation
from schemas.prefix_sketch import DEPTHS
from schemas.records import Decision
from streams.admission.arrival import Arrival
from streams.admission.refusal import Refusal
from tests.unit.test_replay import decision, recording, usage

CHAT: dict[str, Any] = {
    "model": "m",
    "tenants": {"paid": 1},
    "rate": 4.0,
    "prompt": {"lognormal": {"median": 900, "sigma": 0.5}, "most": 4_000},
    "output": {"lognormal": {"median": 200, "sigma": 0.6}, "most": 900},
    "max_tokens": 1_000,
    "prefixes": {"tokens": 512, "count": 4},
}
# In the middle of the minute far more of it comes than two workers with 5 places can serve.
FREE: dict[str, Any] = {
    **CHAT,
    "tenants": {"free": 1},
    "priority": "free",
    "rate": 5.5,
    "spikes": [{"at": 20, "until": 40, "times": 5}],
    "prefixes": None,
}
PLAN: dict[str, Any] = {
    "duration": 60.0,
    "models": {"m": {"shape": "8b"}},
    "fleet": [{"model": "m", "gpu": "h100", "count": 2, "max_num_seqs": 5}],
    "tenants": {"paid": {}, "free": {}},
    "traffic": {"chat": CHAT, "free": FREE},
}
WORKER = {
    "worker_num_blocks": 1_000.0,
    "worker_max_num_seqs": 8.0,
    "worker_prefill_tokens_per_s": 10_000.0,
    "worker_step_time_ms": 12.0,
}


class Short(ShippedPolicy):
    """At most three of class free wait."""

    def admit(self, tenant: str, model: str, seen: Arrival) -> Refusal | None:
        if seen.priority == 1 and seen.queued_requests >= 3:
            return Refusal(429, "closed", "no")
        return super().admit(tenant, model, seen)


@pytest.fixture(scope="module")
def minute() -> Recording:
    """What a fleet of GPUs wrote down in one minute."""
    scenario = parse_scenario(msgspec.yaml.encode(PLAN), "plan", Path())
    found = Recording()
    for record in Simulation(scenario, Path(), record=True).run().record or ():
        found.add(record)
    return found


def dispatch(number: int, slot: int = 0, **inputs: float) -> Decision:
    """At second `number`, to a worker with as many sequences."""
    figures = {**WORKER, "worker_num_seqs": float(number), **inputs}
    made = decision(number, "dispatch", "room", **figures)
    made.slot, made.inputs["arrived_at"] = slot, 1_000.0 * number
    return made


def test_the_shipped_policy_makes_of_a_minute_what_was_recorded(minute: Recording) -> None:
    figures = carried_forward(minute, {}, None)
    recorded, shipped = figures["recorded"], figures["shipped"]
    assert figures["requests"] == recorded["let_in"] + sum(recorded["refused"].values()) > 700
    assert recorded["refused"].keys() == {"free free_class_shed", "free over_fair_share"}
    # Rates that workers told make a fleet that is near the real one, which had GPUs.
    assert shipped["let_in"] == pytest.approx(recorded["let_in"], rel=0.2)
    assert shipped["hit_rate"] == pytest.approx(recorded["hit_rate"], rel=0.2)
    assert shipped["ttft_ms"]["free"]["p90"] == pytest.approx(recorded["ttft_ms"]["free"]["p90"], rel=0.3)
    again = carried_forward(minute, {}, None)
    assert again == figures


def test_another_policy_meets_the_load_that_it_makes(minute: Recording) -> None:
    figures = carried_forward(minute, {}, Short())
    shipped, policy = figures["shipped"], figures["policy"]
    assert policy["refused"].keys() == {"free closed"}  # so short a queue never comes to shedding
    num_refused = policy["refused"]["free closed"]
    assert policy["let_in"] + num_refused == figures["requests"]
    assert policy["ttft_ms"]["free"]["p90"] < 0.5 * shipped["ttft_ms"]["free"]["p90"]
    changed = sum(figures["newly_refused"].values()) - sum(figures["newly_let_in"].values())
    assert changed == num_refused - sum(shipped["refused"].values())
    assert figures["newly_refused"].keys() == {"free free"}
    # One step at a time it meets the long queue of another policy, and refuses what it would have let in.
    step = compare(Short(), minute.requests()).figures()
    assert step["replayed"]["refused"]["free closed"] > num_refused


def test_a_policy_object_decides_as_the_settings_that_it_has() -> None:
    """With one worker there is nothing to choose, and nothing else tells them apart."""

    class Same(ShippedPolicy):
        pass

    fleet = [{**PLAN["fleet"][0], "count": 1}]
    scenario = parse_scenario(msgspec.yaml.encode({**PLAN, "fleet": fleet, "duration": 24.0}), "plan", Path())
    found = Recording()
    for record in Simulation(scenario, Path(), record=True).run().record or ():
        found.add(record)
    figures = carried_forward(found, {}, Same())
    assert figures["policy"] == figures["shipped"]
    assert figures["newly_refused"] == figures["newly_let_in"] == {}


def test_the_fleet_is_the_one_that_served() -> None:
    decisions = [dispatch(n, worker_step_time_ms=5.0 + 2.0 * n) for n in (1, 2, 3)]
    decisions.append(dispatch(4, slot=3, worker_decode_tokens_per_s=500.0))
    first, second = ClosedLoop(recording(decisions).requests(), {}).scenario.fleet
    assert first.measured is not None
    assert second.measured is not None
    assert (first.model, first.max_num_seqs, first.measured.num_blocks) == ("simulated", 8, 1_000)
    assert (first.measured.step_ms, first.measured.seq_ms) == pytest.approx((5.0, 2.0))
    assert first.measured.prefill_tokens_per_s == 10_000.0
    # Steps that only decoded tell more than the mean of all.
    assert (second.measured.step_ms, second.measured.seq_ms) == (8.0, 0.0)


def test_prompts_share_the_beginnings_that_were_seen() -> None:
    a, b, c, d = 11.0, 12.0, 13.0, 14.0
    decisions = [
        dispatch(1, prompt_tokens=150.0, prefix_64=a, prefix_96=b, prefix_128=c),
        dispatch(2, prompt_tokens=150.0, prefix_64=a, prefix_96=b, prefix_128=d),
        dispatch(3, prompt_tokens=80.0, prefix_64=d),
    ]
    arrivals = ClosedLoop(recording(decisions).requests(), {}).arrivals
    one, other, third = (arrival.prompt_token_ids(n) for n, arrival in enumerate(arrivals))
    assert [len(ids) for ids in (one, other, third)] == [150, 150, 80]
    assert one[: DEPTHS[1]] == other[: DEPTHS[1]]
    assert not set(one[DEPTHS[1] :]) & set(other[DEPTHS[1] :])
    assert not set(third) & set(one + other)


def test_answers_are_as_long_as_they_were() -> None:
    decisions = [dispatch(n, max_tokens=100.0, expected_output_tokens=60.0) for n in range(1, 5)]
    decisions[1].inputs["granted_max_tokens"] = 5.0
    found = recording(decisions)
    found.add(usage(1))  # 5 tokens, as all of them
    found.add(usage(2))
    found.add(usage(3))
    loop = ClosedLoop(found.requests(), {"acme": 2.5})
    # The second one was cut short, of the fourth nobody knows.
    assert [arrival.num_output_tokens for arrival in loop.arrivals] == [5, 60, 5, 60]
    assert loop.scenario.tenants["acme"].weight == 2.5


def test_what_limits_refused_is_left_out_and_a_fleet_is_needed() -> None:
    refused = [decision(1, "reject", "token_rate_exceeded"), decision(2, "reject", "free_class_shed")]
    with pytest.raises(ValueError, match="the fleet is not known"):
        ClosedLoop(recording(refused).requests(), {})
    loop = ClosedLoop(recording([*refused, dispatch(3)]).requests(), {})
    assert [request.reason for request in loop.requests] == ["free_class_shed", "room"]


def test_a_policy_that_routes_to_nobody_is_told_so() -> None:
    class Lost(ShippedPolicy):
        def route(self, seen: Arrival, candidates: Sequence[Candidate]) -> int:
            return 7

    loop = ClosedLoop(recording([dispatch(1), dispatch(2, slot=1)]).requests(), {})
    with pytest.raises(ValueError, match=r"routed to slot 7; the candidates were \[0, 1\]"):
        loop.run(Lost())
