"""The scenarios of the repository, and what the shipped decisions make of them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

import infra.simulator
from infra.simulator.measures import Measures
from infra.simulator.report import figures
from infra.simulator.scenario import Scenario, Spike
from infra.simulator.scenario_file import load_scenario
from infra.simulator.simulation import Simulation

SCENARIOS = Path(infra.simulator.__file__).parent / "scenarios"


def scenario(name: str, **changes: Any) -> Scenario:
    return msgspec.structs.replace(load_scenario(SCENARIOS / f"{name}.yaml"), **changes)


def run(of: Scenario) -> tuple[dict[str, Any], Measures]:
    measures = Simulation(of, SCENARIOS).run()
    return figures(of, measures), measures


def mean_of(figures: dict[str, Any], priority: str, start: float, end: float) -> float:
    """Output tokens per GPU and second of a class between two times."""
    series = figures["series"]
    values = series["output_tokens_per_gpu_s"].get(priority, [0.0] * len(series["at_s"]))
    inside = [value for at, value in zip(series["at_s"], values, strict=True) if start <= at < end]
    return float(sum(inside) / len(inside))


def test_every_scenario_of_the_repository_can_be_read() -> None:
    found = {path.stem: load_scenario(path) for path in SCENARIOS.glob("*.yaml")}
    assert set(found) == {
        "greedy_tenant",
        "long_prompts",
        "node_failure",
        "one_node",
        "shared_prompts",
        "spike",
        "waves",
    }
    assert all(each.description for each in found.values())


def test_paid_traffic_is_served_through_a_threefold_spike_and_batch_gives_way() -> None:
    found, _ = run(scenario("spike"))
    paid = found["traffic"]["paid"]
    assert paid["served"] == paid["requests"]
    assert paid["ttft_ms"]["p99"] < 500
    assert all(reason.startswith("429 ") for reason in found["traffic"]["free"]["refused"])
    before, spike = mean_of(found, "batch", 10, 30), mean_of(found, "batch", 50, 150)
    assert spike < 0.3 * before
    assert mean_of(found, "batch", 160, 180) > 0.5 * before


def test_one_tenant_at_twenty_times_its_share_hurts_nobody_else() -> None:
    plan = scenario("greedy_tenant")
    found, _ = run(plan)
    alone, _ = run(msgspec.structs.replace(plan, traffic={"fair": plan.traffic["fair"]}))
    fair = found["traffic"]["fair"]
    assert fair["served"] == fair["requests"]
    # A dispatched request of the greedy tenant holds its seat: that is what the others wait for.
    assert fair["ttft_ms"]["p50"] < alone["traffic"]["fair"]["ttft_ms"]["p50"] + 150
    assert fair["ttft_ms"]["p99"] < 1_000
    greedy = found["traffic"]["greedy"]
    assert sum(greedy["refused"].values()) > 0.5 * greedy["requests"]
    assert all(reason.startswith("429 ") for reason in greedy["refused"])
    # What the others leave is the greedy one's: the worker is as busy as it can be.
    assert found["fleet"]["running_mean"] > 0.9 * 64


def test_batch_fills_the_troughs_of_interactive_waves_and_keeps_out_of_the_crests() -> None:
    plan = scenario("waves")
    found, _ = run(plan)
    alone, _ = run(msgspec.structs.replace(plan, backlogs={}))
    batch_alone, _ = run(msgspec.structs.replace(plan, traffic={}, duration=40.0))
    chat, chat_alone = found["traffic"]["chat"], alone["traffic"]["chat"]
    assert chat["served"] == chat["requests"] == chat_alone["served"]
    assert chat["ttft_ms"]["p50"] <= 500
    assert chat["ttft_ms"]["p99"] <= 2_000
    assert chat["ttft_ms"]["p99"] <= 1.5 * chat_alone["ttft_ms"]["p99"]
    assert chat["time_per_output_token_ms"]["p50"] <= 40
    assert chat["time_per_output_token_ms"]["p99"] <= 60
    # Of what batch makes of an empty node, it gets most in the trough, and less in the crest.
    whole = mean_of(batch_alone, "batch", 10, 40)
    trough, crest = mean_of(found, "batch", 50, 70), mean_of(found, "batch", 25, 35)
    assert trough > 0.8 * whole
    assert crest < 0.7 * trough


@pytest.mark.parametrize(("silent", "longest_pause_s"), [(False, 0.25), (True, 1.5)])
def test_streams_of_a_node_that_dies_at_the_peak_go_on_elsewhere(
    silent: bool, longest_pause_s: float
) -> None:
    plan = scenario("node_failure")
    failure = msgspec.structs.replace(plan.failures[0], silent=silent)
    found, measures = run(msgspec.structs.replace(plan, failures=[failure]))
    chat = found["traffic"]["chat"]
    assert chat["served"] == chat["requests"]
    assert found["fleet"]["retries"] > 5
    assert max(measures.gaps["llama-8b"][0].gap) < longest_pause_s
    assert all(f.num_tokens == min(f.arrival.num_output_tokens, 1024) for f in measures.flights)
    # The slot's next life is served again.
    lives = {f.epoch for f in measures.flights if f.slot == failure.slot}
    assert len(lives) == 2


def test_a_node_with_two_models_offered_three_times_what_it_carries_serves_its_maximum_in_time() -> None:
    plan = scenario("one_node")

    def offered(per_s: float, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        traffic = {
            name: msgspec.structs.replace(each, rate=each.rate * per_s / 300, **changes)
            for name, each in plan.traffic.items()
        }
        found, _ = run(msgspec.structs.replace(plan, traffic=traffic))
        assert found["fleet"]["preemptions"] == 0
        assert found["fleet"]["kv_use_max"] < 1.0
        assert len(found["token_gap_ms"]) == 2
        for gaps in found["token_gap_ms"].values():
            assert gaps["interactive"]["p95"] < 30
        return found, list(found["traffic"].values())

    # With patience both models always have a queue: so much the node can finish.
    _, patient = offered(140, start_ms=15_000)
    assert all(each["queued_ms"]["p50"] > 1_000 for each in patient)
    maximum = sum(each["finished_per_s"] for each in patient)
    assert maximum > 100

    spikes = [Spike(at=at, until=at + 1, times=10.0) for at in (13.0, 18.0)]
    for changes in ({}, {"spikes": spikes}):
        found, served = offered(300, **changes)
        assert sum(each["goodput_per_s"] for each in served) >= 0.85 * maximum
        for each in served:
            assert each["failed"] == {}
            assert each["served"] + sum(each["refused"].values()) == each["requests"]
            assert all(reason.startswith("429 ") for reason in each["refused"])
            assert each["ttft_ms"]["p95"] < 250
        small = found["traffic"]["small"]["refused"]
        assert small["429 start_unreachable"] > 0.9 * sum(small.values())


def test_affinity_finds_more_of_shared_prompts_and_its_cap_keeps_workers_even() -> None:
    def chat(**policy: bool | float) -> tuple[dict[str, Any], dict[str, Any]]:
        found, _ = run(scenario("shared_prompts", policy=policy))
        assert found["traffic"]["chat"]["served"] == found["traffic"]["chat"]["requests"]
        return found["traffic"]["chat"], found["fleet"]

    without, fleet_without = chat(prefix_affinity=False)
    uncapped, fleet_uncapped = chat(max_affinity=1e9)
    half, fleet_half = chat(max_affinity=0.5)
    capped, fleet_capped = chat()
    found = [fleet["prefix_hit_rate"] for fleet in (fleet_without, fleet_half, fleet_capped)]
    assert found[0] + 0.05 < found[1] < found[1] + 0.05 < found[2]
    assert abs(found[2] - fleet_uncapped["prefix_hit_rate"]) < 0.03  # the default costs no hits
    assert without["ttft_ms"]["p50"] > 1.15 * half["ttft_ms"]["p50"]
    assert half["ttft_ms"]["p50"] > 1.05 * capped["ttft_ms"]["p50"]
    assert capped["ttft_ms"]["p99"] < without["ttft_ms"]["p99"]
    assert uncapped["ttft_ms"]["p50"] < without["ttft_ms"]["p50"]
    assert max(fleet["hottest_worker"] for fleet in (fleet_half, fleet_capped)) < 1.1


def test_the_same_seed_gives_the_same_figures() -> None:
    plan = scenario("node_failure", duration=20.0, failures=[])
    first, _ = run(plan)
    assert run(plan)[0] == first
    assert run(msgspec.structs.replace(plan, seed=7))[0] != first
