"""Figures of a simulated run, and the command that prints them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from infra.cli import app
from infra.simulator.measures import Flight, Measures, Sample
from infra.simulator.report import figures, percentiles
from infra.simulator.scenario import Lengths, Model, Scenario, TenantPlan, Traffic, Workers
from infra.simulator.workload import Arrival
from schemas.priority import PriorityClass

PLAN = Scenario(
    duration=10.0,
    warm_up=2.0,
    models={"m": Model("8b")},
    fleet=[Workers("m", "h100", count=2)],
    tenants={"a": TenantPlan()},
    traffic={
        "chat": Traffic(
            "m",
            {"a": 1.0},
            prompt=Lengths(fixed=10),
            output=Lengths(fixed=3),
            target_ttft_ms=100.0,
            target_itl_ms=20.0,
        )
    },
)
SMALL = """
duration: 3
models: {m: {shape: 8b}}
fleet: [{model: m, gpu: h100}]
tenants: {a: {}}
traffic:
  chat: {model: m, tenants: {a: 1}, rate: 10, prompt: {fixed: 100}, output: {fixed: 20}}
"""


def flight(number: int, at: float, first: float | None, last: float = 0.0, **changes: Any) -> Flight:
    arrival = Arrival(at, "chat", "a", "m", PriorityClass.INTERACTIVE, 10, 3, 3)
    values = {"slot": number % 2, "num_tokens": 3, "dispatched_at": at + 0.01, "ended_at": last} | changes
    return Flight(number, arrival, first_token_at=first, last_token_at=last, **values)


def test_percentiles_are_values_themselves_and_heed_weights() -> None:
    assert percentiles([3.0, 1.0, 2.0, 4.0]) == {"p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0}
    weighted = percentiles([1.0, 9.0], np.array([96, 4]))
    assert weighted == {"p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 9.0}
    assert percentiles([]) is None


def test_a_run_is_summed_up_by_traffic_tenant_and_time() -> None:
    measures = Measures()
    measures.flights = [
        flight(0, 1.0, 1.05, 1.09),  # in the warm-up
        flight(1, 3.0, 3.05, 3.07),  # served well
        flight(2, 4.0, 4.2, 4.22),  # its first token was late
        flight(3, 5.0, 5.05, 5.25),  # its tokens were slow
        flight(4, 6.0, None, refused="over_fair_share", refused_status=429, num_tokens=0, slot=-1),
        flight(5, 7.0, 7.05, 7.07, failed="worker_lost"),
    ]
    gaps = measures.gaps_of("m")[PriorityClass.INTERACTIVE]
    gaps.add(1.5, 0.5, 10)  # in the warm-up
    gaps.extend([3.06, 3.07], [0.01, 0.02], 4)
    measures.samples = [Sample(3.0, {0: 0.5, 1: 0.25}, 2, (1, 0, 0)), Sample(20.0, {0: 1.0}, 9, (0, 0, 0))]
    found = figures(PLAN, measures)
    chat = found["traffic"]["chat"]
    assert (chat["requests"], chat["served"]) == (5, 3)
    assert chat["refused"] == {"429 over_fair_share": 1}
    assert chat["failed"] == {"worker_lost": 1}
    assert chat["goodput_per_s"] == 1 / 8
    assert chat["finished_per_s"] == 3 / 8
    assert chat["ttft_ms"]["p50"] == pytest.approx(53)  # a hop of 3 ms is the client's
    assert chat["time_per_output_token_ms"]["p99"] == pytest.approx(100)
    assert found["tenants"]["a"]["refused"] == 1
    assert found["token_gap_ms"]["m"]["interactive"]["p50"] == pytest.approx(10)
    assert found["fleet"]["kv_use_max"] == 0.5
    # Two pairs of four tokens, and the four first ones of those that arrived after the warm-up.
    assert found["fleet"]["output_tokens_per_gpu_s"] == pytest.approx((8 + 4) / 8 / 2)
    series = found["series"]
    assert len(series["at_s"]) == 60
    assert series["shed_rate"][36] == 1.0
    assert series["shed_rate"][59] is None
    json.dumps(found, allow_nan=False)


def test_the_command_prints_json_last_and_draws_a_picture(tmp_path: Path) -> None:
    path, picture = tmp_path / "small.yaml", tmp_path / "small.png"
    path.write_text(SMALL)
    result = CliRunner().invoke(app, ["simulate", str(path), "--picture", str(picture), "--seed", "3"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["scenario"] == "small"
    assert found["seed"] == 3
    assert found["traffic"]["chat"]["served"] == found["traffic"]["chat"]["requests"] > 10
    assert picture.read_bytes().startswith(b"\x89PNG")
    stepped = CliRunner().invoke(app, ["simulate", str(path), "--step", "--seed", "3"])
    other = json.loads(stepped.stdout.splitlines()[-1])
    assert other["fleet"].pop("steps_leapt") == 0
    assert found["fleet"].pop("steps_leapt") > 0
    assert other["traffic"] == found["traffic"]
    assert other["fleet"] == found["fleet"]


def test_the_command_names_the_field_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SMALL.replace("shape: 8b", "shape: 9b"))
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert result.exit_code == 1
    assert "$.models.m.shape: '9b' is none of" in result.stderr
