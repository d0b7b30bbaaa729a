"""How many requests the fleet simulator gets through in a minute, stepping and leaping.

The same requests both ways, by the wall clock; the fastest of some runs counts, for a shared machine only
ever adds. There are no shared prompts, so nothing is cached or routed by prefix. `chat` is four workers of an
8b model with Poisson arrivals; `chat_beside_batch` has batch work in every place that they leave, so that
most steps are held to an inter-token target.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from infra.benchmarks.machine import wait_for_calm
from infra.simulator.scenario import (
    BatchBacklog,
    Lengths,
    Lognormal,
    Model,
    Scenario,
    TenantPlan,
    Traffic,
    Workers,
)
from infra.simulator.simulation import Simulation

_CALM_S = 60.0
_CHAT = Scenario(
    duration=60.0,
    models={"m": Model("8b")},
    fleet=[Workers("m", "h100", count=4, prefix_caching="off")],
    tenants={"a": TenantPlan(), "b": TenantPlan(weight=2.0)},
    traffic={
        "chat": Traffic(
            "m",
            {"a": 1.0, "b": 3.0},
            rate=60.0,
            prompt=Lengths(lognormal=Lognormal(500.0, 0.8)),
            output=Lengths(lognormal=Lognormal(200.0, 0.5)),
            max_tokens=1024,
        )
    },
    policy={"prefix_affinity": False},
)
_BACKLOG = BatchBacklog("m", "a", 100_000, Lengths(fixed=600), Lengths(lognormal=Lognormal(150.0, 0.4)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of each case, of which the fastest counts"
    )


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    await wait_for_calm(_CALM_S, report)
    figures: dict[str, Any] = {}
    for name, backlogs in (("chat", {}), ("chat_beside_batch", {"night": _BACKLOG})):
        scenario = replace(_CHAT, backlogs=backlogs)
        figures[name] = {
            way: max(_requests_per_minute(scenario, leap=leap) for _ in range(options.repeat))
            for way, leap in (("requests_per_minute_stepping", False), ("requests_per_minute_leaping", True))
        }
        report(f"{name}: {figures[name]}")
    return figures


def _requests_per_minute(scenario: Scenario, *, leap: bool) -> float:
    simulation = Simulation(scenario, Path(), leap=leap)
    began = time.perf_counter()
    measures = simulation.run()
    return round(len(measures.flights) / (time.perf_counter() - began) * 60)
