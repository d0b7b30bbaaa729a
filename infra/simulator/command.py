"""`headrace simulate`: a scenario's outcome as JSON on the last line of standard output, and as a picture."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from infra.simulator.report import figures
from infra.simulator.scenario import Scenario
from infra.simulator.scenario_file import load_scenario
from infra.simulator.simulation import Simulation


def simulate(
    path: Path, *, leap: bool, seed: int | None, picture: Path | None, report: Callable[[str], None]
) -> str:
    """Runs the scenario at `path`; returns its figures as one line. `seed` None: the scenario's own.

    Raises ScenarioError or ValueError for what is wrong in the scenario or its traces, OSError for a picture
    that cannot be written.
    """
    scenario: Scenario = load_scenario(path)
    if seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=seed)
    began = time.perf_counter()
    measures = Simulation(scenario, path.parent, leap=leap).run()
    took = time.perf_counter() - began
    report(f"{len(measures.flights)} requests and {measures.num_steps} steps in {took:.1f} s")
    found = {"scenario": path.stem, **figures(scenario, measures)}
    if picture is not None:
        from infra.simulator.picture import draw  # matplotlib takes half a second to load

        draw(found, scenario.description or path.stem, picture)
        report(f"picture: {picture}")
    return json.dumps(found)
