"""`headrace replay` without Kafka: recorded decisions in, differences out."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.replay.closed_loop import ClosedLoop
from infra.replay.command import parse_time
from infra.replay.comparison import compare
from infra.replay.policy import Candidate, PolicyError, ShippedPolicy, load_policy
from infra.replay.recording import Recording
from schemas.budgets import exceeded, month_of, spend_key
from schemas.records import Amount, Budget, Decision, Spend, Usage
from streams.admission.arrival import Arrival, OverloadPolicy
from streams.admission.router import RoutingPolicy
from tests.unit.test_admission_overload import CALM, Spike


@pytest.fixture(scope="module")
def overload() -> list[Decision]:
    """9 s in which half of what comes can be served."""
    spike = Spike(200)
    for name in ("paid", "free"):
        spike.tenant(name)
    for _ in range(90):
        arrivals = [spike.driver.request(tenant="paid") for _ in range(10)]
        arrivals += [spike.driver.request(tenant="free", priority=1) for _ in range(30)]
        arrivals += [spike.driver.request(tenant="nobody")]
        spike.step(arrivals)
    decisions = spike.driver.admission.decisions.drain()
    assert {d.action for d in decisions} >= {"dispatch", "reject", "shed"}
    return decisions


def recording(decisions: list[Decision]) -> Recording:
    found = Recording()
    for decision in decisions:
        found.add(decision)
    return found


def test_the_shipped_policy_decides_the_same_of_its_own_record(overload: list[Decision]) -> None:
    recorded = recording(overload)
    figures = compare(ShippedPolicy(), recorded.requests()).figures()
    assert figures["recorded"] == figures["replayed"]
    assert figures["newly_refused"] == figures["newly_let_in"] == {}
    assert figures["recorded"]["refused"].keys() == {"free free_class_shed", "free over_fair_share"}
    assert recorded.num_unseen == 90  # of a tenant that is not there


def test_what_a_budget_refused_is_refused_again_by_what_was_left_of_it() -> None:
    spike = Spike(200)
    budget, month = Budget("10", "USD", [80]), month_of(spike.driver.now)
    spike.tenant("thrifty", budget=budget)
    spike.tenant("warned", budget=replace(budget, hard_stop=False))
    for spent in ("9.999999999999999999", "10"):
        for name in ("thrifty", "warned"):
            told = Spend(name, month, [Amount("USD", spent)], [])
            spike.driver.admission.budgets.put(spend_key(name, month), told)
        spike.step([spike.driver.request(tenant=name) for name in ("thrifty", "warned") for _ in range(5)])
    decisions = spike.driver.admission.decisions.drain()
    found = [(d.action, d.reason, d.inputs["budget_left"]) for d in decisions if d.tenant == "thrifty"]
    assert found == [("dispatch", "room", 1e-18)] * 5 + [("reject", "budget_exceeded", 0.0)] * 5
    recorded = recording(decisions)
    assert recorded.num_unseen == 0

    class Open(ShippedPolicy):
        def admit(self, tenant: str, model: str, seen: Arrival) -> None:
            return None

    for policy in (ShippedPolicy(), Open()):
        figures = compare(policy, recorded.requests()).figures()
        assert figures["recorded"] == figures["replayed"]
        assert figures["replayed"]["refused"] == {"interactive budget_exceeded": 5}
        assert figures["newly_refused"] == figures["newly_let_in"] == {}
    assert len(ClosedLoop(recorded.requests(), {}).requests) == 15


@given(st.decimals(0, 10**9, places=6), st.decimals(0, 10**9, places=12))
def test_a_record_of_a_budget_says_what_was_decided_by_it(amount: Decimal, spent: Decimal) -> None:
    seen = Arrival(**CALM, budget_left=float(amount - spent))
    again = Arrival.from_inputs(seen.inputs())
    assert again == seen
    assert again.is_out_of_budget is exceeded(Budget(str(amount), "USD", []), spent)
    assert not Arrival.from_inputs(Arrival(**CALM).inputs()).is_out_of_budget


def test_another_policy_refuses_others(overload: list[Decision]) -> None:
    strict = ShippedPolicy(OverloadPolicy(start_ms=(60_000, 100, 0)))
    figures = compare(strict, recording(overload).requests()).figures()
    assert figures["newly_refused"].keys() == {"free free"}
    assert "free start_unreachable" in figures["replayed"]["refused"]
    assert figures["replayed"]["let_in"] < figures["recorded"]["let_in"]
    assert figures["replayed"]["predicted_ttft_ms"]["p99"] <= figures["recorded"]["predicted_ttft_ms"]["p99"]

    class Open(ShippedPolicy):
        def admit(self, tenant: str, model: str, seen: Arrival) -> None:
            return None

    figures = compare(Open(), recording(overload).requests()).figures()
    assert figures["newly_let_in"]["free free"] == sum(figures["recorded"]["refused"].values())
    assert figures["replayed"]["refused"] == {}


def decision(number: int, action: str = "dispatch", reason: str = "room", **inputs: Any) -> Decision:
    figures = Arrival(**{**CALM, "arrived_at": number}).inputs()
    request_id = number.to_bytes(16, "big")
    return Decision(request_id, 1, "acme", 0, "simulated", action, reason, {**figures, **inputs}, slot=0)


def usage(number: int, **fields: Any) -> Usage:
    request_id = number.to_bytes(16, "big")
    values = {"cached_tokens": 0, "first_token_ms": 200, "attempt": 1, **fields}
    cached, attempt = values.pop("cached_tokens"), values.pop("attempt")
    return Usage(
        request_id, attempt, False, "acme", 0, "simulated", 100, cached, 5, "stop", 1, 2, 0, 3, **values
    )


def test_what_limits_refused_stays_refused() -> None:
    recorded = recording([decision(1, "reject", "token_rate_exceeded"), decision(2, "evict", "expired")])
    comparison = compare(ShippedPolicy(), recorded.requests())
    assert comparison.replayed.refused == {("interactive", "token_rate_exceeded"): 1}
    assert (comparison.evicted, comparison.replayed.let_in, sum(comparison.newly_let_in.values())) == (
        1,
        1,
        0,
    )


def test_the_truth_is_what_usage_says() -> None:
    recorded = recording([decision(1, queued_ms=9_900.0, cached_tokens=32.0), decision(2)])
    recorded.add(usage(1, cached_tokens=64))
    recorded.add(usage(2, attempt=2))  # it ran twice: when it began says nothing of the prediction
    figures = compare(ShippedPolicy(), recorded.requests()).figures()
    assert figures["real_ttft_ms"] == {"p50": 10_100.0, "p90": 10_100.0, "p99": 10_100.0}
    assert figures["recorded"]["ttft_error_ms"]["p50"] == 0.0  # 10 s of waiting and 100 ms were predicted
    assert figures["recorded"]["predicted_hit_rate"] == 0.16
    assert figures["real_hit_rate"] == 0.32


def test_where_another_policy_sends_a_request() -> None:
    figures: dict[str, Any] = {
        "slot_0_load": 0.5,
        "slot_0_cached_tokens": 96.0,
        "slot_0_slowness": 1.0,
        "slot_0_prefill_ms": 5.0,
        "slot_1_load": 0.42,
        "slot_1_cached_tokens": 0.0,
        "slot_1_slowness": 1.0,
    }
    recorded = recording([decision(1, cached_tokens=96.0, **figures)])
    assert compare(ShippedPolicy(), recorded.requests()).routed_elsewhere == 0
    without = compare(ShippedPolicy(routing=RoutingPolicy(affinity=False)), recorded.requests())
    assert without.routed_elsewhere == 1
    assert without.figures()["replayed"]["predicted_hit_rate"] == 0.0
    assert without.figures()["recorded"]["predicted_hit_rate"] == 0.96

    class Lost(ShippedPolicy):
        def route(self, seen: Arrival, candidates: Sequence[Candidate]) -> int:
            return 7

    with pytest.raises(ValueError, match=r"routed to slot 7; the candidates were \[0, 1\]"):
        compare(Lost(), recorded.requests())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", "has no function make_policy"),
        ("def make_policy():\n    return 1", "gave a int without all of Policy's methods"),
        ("import nothing_like_that", "ModuleNotFoundError"),
        ("def make_policy(:", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_policy(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "policy.py"
    path.write_text(text)
    with pytest.raises(PolicyError, match=error):
        load_policy(path)


def test_a_policy_is_loaded_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.py"
    path.write_text(
        "from infra.replay.policy import ShippedPolicy\n\ndef make_policy():\n    return ShippedPolicy()\n"
    )
    assert isinstance(load_policy(path), ShippedPolicy)
    with pytest.raises(PolicyError, match="no Python file"):
        load_policy(tmp_path / "absent.py")


def test_times() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert parse_time("90s", now) == datetime(2026, 3, 1, 11, 58, 30, tzinfo=UTC)
    assert parse_time("2h", now) == datetime(2026, 3, 1, 10, tzinfo=UTC)
    assert parse_time("2026-03-01T11:00", now) == datetime(2026, 3, 1, 11, tzinfo=UTC)
    with pytest.raises(ValueError, match="'soon' is no time"):
        parse_time("soon", now)
