"""Handoffs in the simulated fleet: layer by layer, whoever dies, and what streams gain by it."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from infra.benchmarks.disaggregation_simulated import (
    LONG_PROMPTS,
    decode_rate,
    inter_token_times,
    prefill_rate,
    split,
    textbook_transfer,
    workers,
)
from infra.replay.comparison import compare
from infra.replay.policy import ShippedPolicy
from infra.replay.recording import Recording
from infra.simulator.handoffs import Link, sent_at
from infra.simulator.measures import Measures
from infra.simulator.pool_ratio import Demand, pool_ratio
from infra.simulator.scenario import Failure, Lengths, Model, Scenario, TenantPlan, Traffic, Workers
from infra.simulator.scenario_file import ScenarioError, load_scenario, parse_scenario
from infra.simulator.simulation import Simulation
from schemas.handoff_records import WorkerRole
from streams.admission.hop import HopPolicy
from streams.admission.router import RoutingPolicy

PREFILL, DECODE, UNIFIED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.UNIFIED


def scenario(fleet: list[Workers], **changes: Any) -> Scenario:
    chat = Traffic(
        "llama-70b",
        {"a": 1.0},
        rate=3.0,
        prompt=Lengths(histogram=[(20, 1.0), (800, 1.0), (3_000, 2.0)]),
        output=Lengths(histogram=[(1, 1.0), (5, 1.0), (200, 6.0)]),
        max_tokens=150,
    )
    models = {"llama-70b": Model("70b")}
    made = Scenario(12.0, models, fleet, {"a": TenantPlan()}, {"chat": chat}, seed=2)
    return replace(made, **changes)


def run(of: Scenario, **options: Any) -> tuple[Simulation, Measures]:
    simulation = Simulation(of, Path(), **options)
    return simulation, simulation.run()


def check_whole(simulation: Simulation, measures: Measures) -> None:
    """Every request has all its tokens, and nobody holds a block."""
    for flight in measures.flights:
        assert (flight.failed, flight.refused) == (None, None)
        assert flight.num_tokens == min(flight.arrival.num_output_tokens, 150)
    for worker in simulation._workers.values():
        pool = worker.scheduler.kv_cache_manager.pool
        assert pool.num_free_blocks == pool.num_blocks
        if worker.handoffs is not None:
            assert worker.handoffs.num_kept == 0
    assert len(simulation._admission.admission.router.reservations) == 0


@pytest.mark.parametrize(("began", "ended", "num_bytes", "not_before"), [
    (0.0, 0.1, 5.0, 0.0), (0.0, 0.1, 500.0, 0.0), (1.0, 1.2, 10.0, 1.15), (1.0, 1.2, 10.0, 2.0),
    (1.0, 1.2, 0.0, 0.0),
])  # fmt: skip
def test_a_step_is_sent_layer_by_layer(
    began: float, ended: float, num_bytes: float, not_before: float
) -> None:
    layers, rate, busy_until = 8, 100.0, 0.3
    gone = busy_until
    for layer in range(1, layers + 1):
        there = max(not_before, began + layer * (ended - began) / layers)
        gone = max(gone, there) + num_bytes / layers / rate
    out, into = Link(rate, busy_until), Link(1e9)
    assert sent_at(out, into, num_bytes, layers, began, ended, not_before) == pytest.approx(gone)
    assert out.free_at == pytest.approx(gone)
    # The slower end decides, whichever it is.
    out, into = Link(1e9), Link(rate, busy_until)
    assert sent_at(out, into, num_bytes, layers, began, ended, not_before) == pytest.approx(gone)


def test_all_roles_together_serve_every_request_to_its_last_token() -> None:
    simulation, measures = run(scenario([*split(1, 1), workers(UNIFIED, 1)]))
    assert len(measures.handoffs) > 5
    check_whole(simulation, measures)


def test_leaps_change_nothing() -> None:
    plan = scenario(split(1, 1))
    stepping = run(plan, leap=False, log_tokens=True)[1]
    leaping = run(plan, leap=True, log_tokens=True)[1]
    assert leaping.num_steps_leapt > 100
    assert stepping.token_log is not None
    assert leaping.token_log is not None
    assert [f.slot for f in leaping.flights] == [f.slot for f in stepping.flights]
    one, same = sorted(leaping.token_log), sorted(stepping.token_log)
    assert [entry[:2] for entry in one] == [entry[:2] for entry in same]
    assert [entry[2] for entry in one] == pytest.approx([entry[2] for entry in same], abs=1e-9)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_whoever_dies_streams_go_on(slot: int, silent: bool) -> None:
    fleet = split(1, 2)
    failures = [Failure(at, slot, back_at=at + 1.6, silent=silent) for at in (2.0, 5.03, 8.01)]
    simulation, measures = run(scenario(fleet, failures=failures))
    check_whole(simulation, measures)
    assert measures.handoffs


@pytest.mark.parametrize("lone", [PREFILL, DECODE])
def test_one_pool_alone_serves_whole_requests(lone: WorkerRole) -> None:
    simulation, measures = run(scenario([workers(lone, 2)]))
    assert not measures.handoffs
    check_whole(simulation, measures)
    missing = {PREFILL: DECODE, DECODE: PREFILL}[lone]
    assert list(simulation._admission.admission.router.pool_states()) == [("llama-70b", missing, True)]


def test_a_full_decode_pool_keeps_no_request_from_its_end() -> None:
    tight = replace(split(1, 1)[1], max_num_seqs=3, memory_share=0.55)
    simulation, measures = run(scenario([split(1, 1)[0], tight]))
    assert measures.handoffs
    check_whole(simulation, measures)


def test_a_transfer_of_640_mb_is_seen_for_less_than_3_ms() -> None:
    found = textbook_transfer()
    assert 600 < found["kv_mb"] < 700
    assert found["transfer_whole_ms"] == pytest.approx(13.1, abs=0.1)
    assert found["transfer_visible_ms"] <= 3


def test_long_prompts_hold_up_no_stream_where_they_are_computed_elsewhere() -> None:
    plan = load_scenario(LONG_PROMPTS)
    itl = inter_token_times(replace(plan, duration=30.0))["itl_p99_ms"]
    assert itl["disaggregated"] < itl["chunked"] / 1.5
    assert itl["chunked"] < itl["unified"] / 2


def test_pools_follow_from_what_each_has_to_do() -> None:
    even = Demand(1_000, 100, 1_000, 100)
    assert pool_ratio(even, 8) == (4, 4)
    assert pool_ratio(Demand(3_000, 100, 1_000, 100), 8) == (6, 2)
    assert pool_ratio(Demand(10, 1_000, 1_000, 100), 8) == (1, 7)
    assert even.use(4, 4) == 0.25
    with pytest.raises(ValueError, match="2 workers"):
        pool_ratio(even, 1)
    assert prefill_rate(2_000) > decode_rate(2_000) > 0


def test_a_measured_worker_has_no_other_role() -> None:
    text = b"""
duration: 1
models: {m: {}}
fleet: [{model: m, role: decode, measured: {num_blocks: 10, step_ms: 5},
  swap_memory_mib: 0}]
tenants: {a: {}}
"""
    with pytest.raises(ScenarioError, match=r"fleet\[0\]\.role"):
        parse_scenario(text, "test", Path())


def test_what_was_decided_is_decided_again_by_its_record() -> None:
    _, measures = run(scenario(split(1, 1)), record=True)
    recorded = Recording()
    for record in measures.record or ():
        recorded.add(record)
    same = compare(ShippedPolicy(), recorded.requests()).figures()["handoffs"]
    ended_at_prefill = same["recorded"] - len(measures.handoffs)
    assert 0 <= ended_at_prefill <= sum(f.num_tokens == 1 for f in measures.flights)
    assert 0 < same["recorded"] < same["choices"]
    assert same["otherwise"] == 0
    dear = RoutingPolicy(hop=HopPolicy(overhead_ms=1e6))
    other = compare(ShippedPolicy(routing=dear), recorded.requests()).figures()["handoffs"]
    assert other["otherwise"] == same["recorded"]
