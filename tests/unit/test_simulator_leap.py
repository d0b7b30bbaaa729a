"""Leaping is stepping: the same tokens at the same times, and the same decisions."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from infra.simulator.measures import Measures
from infra.simulator.scenario import Scenario
from infra.simulator.scenario_file import parse_scenario
from infra.simulator.simulation import Simulation
from schemas.records import Decision
from workers.scheduler import Scheduler

# HBM so small that blocks run out: 8b in FP8 leaves 8 GB x share - 8 GB for KV.
_SCARCE, _AMPLE = 0.102, 0.9


def scenario(plan: dict[str, Any]) -> Scenario:
    return parse_scenario(msgspec.yaml.encode(plan), "test", Path())


def outcome(plan: dict[str, Any], *, leap: bool) -> Measures:
    return Simulation(scenario(plan), Path(), leap=leap, log_tokens=True, record=True).run()


def decisions(measures: Measures) -> list[Decision]:
    return [entry for entry in measures.record or () if isinstance(entry, Decision)]


def assert_equal(stepped: Measures, leapt: Measures) -> None:
    def tokens(measures: Measures) -> list[tuple[int, int, float]]:
        assert measures.token_log is not None
        return sorted(measures.token_log)

    assert decisions(leapt) == decisions(stepped)
    assert [entry[:2] for entry in tokens(leapt)] == [entry[:2] for entry in tokens(stepped)]
    assert [entry[2] for entry in tokens(leapt)] == pytest.approx(
        [entry[2] for entry in tokens(stepped)], abs=1e-9
    )
    assert leapt.num_steps == stepped.num_steps
    assert leapt.num_preemptions == stepped.num_preemptions
    assert (leapt.num_prefix_hits, leapt.num_prefix_queries) == (
        stepped.num_prefix_hits,
        stepped.num_prefix_queries,
    )
    assert leapt.num_retries == stepped.num_retries
    for mine, other in zip(leapt.samples, stepped.samples, strict=True):
        assert (mine.kv_use, mine.num_running, mine.num_queued) == (
            other.kv_use,
            other.num_running,
            other.num_queued,
        )
    for log, same_log in zip(leapt.gaps["m"], stepped.gaps["m"], strict=True):
        assert sum(log.count) == sum(same_log.count)
    for one, same in zip(leapt.flights, stepped.flights, strict=True):
        assert (one.slot, one.attempt, one.num_tokens, one.refused, one.failed) == (
            same.slot,
            same.attempt,
            same.num_tokens,
            same.refused,
            same.failed,
        )


def lengths(most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(lambda n: {"fixed": n}, st.integers(1, most)),
        st.builds(
            lambda median, sigma: {"lognormal": {"median": median, "sigma": sigma}, "most": 4 * most},
            st.integers(1, most),
            st.floats(0.1, 1.0),
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Fleets of one or two workers, with much or little memory, all classes, prefixes and failures."""
    prefixes = (
        {"tokens": draw(st.integers(16, 400)), "count": 3, "zipf": 1.0} if draw(st.booleans()) else None
    )
    traffic = {
        priority: {
            "model": "m",
            "tenants": {"a": 1, "b": 3},
            "rate": draw(st.floats(1.0, 30.0)),
            "prompt": draw(lengths(1_500)),
            "output": draw(lengths(120)),
            "max_tokens": draw(st.sampled_from([None, 200])),
            "priority": priority,
            "prefixes": prefixes,
            "start_ms": draw(st.sampled_from([None, 200, 2_000])),
        }
        for priority in draw(st.lists(st.sampled_from(["interactive", "free"]), min_size=1, unique=True))
    }
    backlogs = {}
    if draw(st.booleans()):
        backlogs["night"] = {
            "model": "m",
            "tenant": "a",
            "requests": 60,
            "window": draw(st.integers(1, 40)),
            "prompt": draw(lengths(800)),
            "output": draw(lengths(120)),
        }
    failures = []
    if draw(st.booleans()):
        failures.append(
            {"at": draw(st.floats(0.5, 3.0)), "slot": 0, "silent": draw(st.booleans()), "back_at": 3.5}
        )
    if draw(st.booleans()):
        hardware = {
            "gpu": "h100",
            "memory_share": draw(st.sampled_from([_SCARCE, _AMPLE])),
            "swap_memory_mib": draw(st.sampled_from([0, 256])),
        }
    else:
        measured = {
            "num_blocks": draw(st.integers(600, 5_000)),
            "step_ms": draw(st.floats(2.0, 20.0)),
            "seq_ms": draw(st.sampled_from([0.0, 0.1])),
            "prefill_tokens_per_s": draw(st.sampled_from([0.0, 9_000.0])),
        }
        hardware = {"measured": measured, "swap_memory_mib": 0}
    return {
        "duration": 4.0,
        "seed": draw(st.integers(0, 1 << 30)),
        "models": {"m": {"shape": "8b", "max_model_len": 8_192}},
        "fleet": [
            {
                "model": "m",
                **hardware,
                "count": draw(st.integers(1, 2)),
                "max_num_seqs": draw(st.sampled_from([4, 16, 64])),
                "inter_token_target_ms": draw(st.sampled_from([0.0, 6.0, 45.0])),
                "prefix_caching": draw(st.sampled_from(["tenant", "shared", "off"])),
                "hold_batch_in_prefill": draw(st.booleans()),
            }
        ],
        "tenants": {"a": {}, "b": {"weight": 2.0, "limits": {"max_concurrent_requests": 30}}},
        "traffic": traffic,
        "backlogs": backlogs,
        "failures": failures,
    }


# Not shrunk: an example takes a second, and its plan says enough.
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(plans())
def test_leaping_gives_the_same_tokens_at_the_same_times_and_the_same_decisions(plan: dict[str, Any]) -> None:
    assert_equal(outcome(plan, leap=False), outcome(plan, leap=True))


def test_steps_of_other_workers_that_end_with_the_last_request_are_told() -> None:
    """Steps take the same time whatever is in them: those of both workers end together, and batch work goes
    on after the last request."""
    measured = {"num_blocks": 3_859, "step_ms": 14.372943955630744}
    fleet = {"model": "m", "measured": measured, "swap_memory_mib": 0, "count": 2, "max_num_seqs": 4}
    traffic = {"model": "m", "tenants": {"a": 1, "b": 3}, "max_tokens": 200, "start_ms": 2_000}
    traffic["prefixes"] = {"tokens": 176, "count": 3, "zipf": 1.0}
    free = {"rate": 2.00001, "prompt": {"fixed": 289}, "output": {"fixed": 31}}
    interactive = {"rate": 26.69119139567708, "prompt": {"fixed": 35}, "output": {"fixed": 23}}
    prompt = {"lognormal": {"median": 1, "sigma": 0.2114294647997437}, "most": 3_200}
    backlog = {"model": "m", "tenant": "a", "requests": 60, "window": 14, "output": {"fixed": 100}}
    plan = {
        "duration": 4.0,
        "seed": 1224,
        "models": {"m": {"shape": "8b", "max_model_len": 8_192}},
        "fleet": [{**fleet, "inter_token_target_ms": 45.0, "prefix_caching": "off"}],
        "tenants": {"a": {}, "b": {"weight": 2.0, "limits": {"max_concurrent_requests": 30}}},
        "traffic": {
            "free": {**traffic, **free, "priority": "free"},
            "interactive": {**traffic, **interactive, "priority": "interactive"},
        },
        "backlogs": {"night": {**backlog, "prompt": prompt}},
    }
    assert_equal(outcome(plan, leap=False), outcome(plan, leap=True))


def test_most_steps_beside_batch_work_do_not_read_each_sequence() -> None:
    """With interactive and batch requests decoding and prompts of both coming, the run that a worker has is
    closed for few of its steps."""
    traffic = {"model": "m", "tenants": {"a": 1}, "prompt": {"fixed": 300}, "output": {"fixed": 60}}
    backlog = {
        "model": "m",
        "tenant": "a",
        "requests": 400,
        "prompt": {"fixed": 200},
        "output": {"fixed": 60},
    }
    plan = {
        "duration": 3.0,
        "models": {"m": {"shape": "8b", "max_model_len": 8_192}},
        "fleet": [{"model": "m", "gpu": "h100", "count": 1, "inter_token_target_ms": 45.0}],
        "tenants": {"a": {}},
        "traffic": {"chat": {**traffic, "rate": 20.0}},
        "backlogs": {"night": {**backlog, "window": 60}},
    }
    simulation = Simulation(scenario(plan), Path(), leap=True)
    with patch.object(Scheduler, "schedule", autospec=True, side_effect=Scheduler.schedule) as schedule:
        measures = simulation.run()
    assert measures.num_steps > 200
    assert schedule.call_count < measures.num_steps / 10
