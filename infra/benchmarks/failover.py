"""What clients see when a process of the stack dies or stands still: gaps, retries, and no token wrong.

Each fault is done to streams that run on the simulated model, a step every 5.75 ms, with two gateways and
two workers; clients whose connection breaks come back at the other gateway. Keys per fault: the largest gap
between two events of a stream after it, over the streams it concerned; retries and claims in the log. It
fails where a token was lost, doubled or billed wrongly.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.benchmarks import faults
from infra.benchmarks.bench_stack import bench_stack
from infra.benchmarks.faults import Fault, Load, inflict
from schemas.catalog import SIMULATED_MODEL

# name: the fault, the load, and what has to be started again
_FAULTS: dict[str, tuple[Fault, Load, tuple[str, ...]]] = {
    "worker_process_killed": (faults.worker_process, Load(16, 600), ("worker-0",)),
    "worker_host_lost": (faults.worker_host, Load(16, 800), ("worker-0",)),
    "worker_drained": (faults.worker_drain, Load(16, 600), ("worker-0",)),
    "broker_stalled_3s": (faults.broker_stalled, Load(64, 1_200), ()),
    "gateway_stopped_5s": (faults.stopped("gateway-0", 5.0), Load(16, 1_500), ()),
    "gateway_drained": (faults.gateway_drain, Load(16, 2_500), ("gateway-0",)),
    "gateway_killed": (faults.gateway_killed, Load(200, 1_200), ("gateway-0",)),
    "gateway_and_worker_killed": (faults.gateway_and_worker, Load(16, 1_200), ("gateway-0", "worker-0")),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=float, default=5.75)
    parser.add_argument("--only", nargs="+", choices=sorted(_FAULTS), default=tuple(_FAULTS))


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {"step_ms": options.step_ms}
    async with bench_stack(
        report,
        models_dir=Path(),
        models=(SIMULATED_MODEL,),
        runner="simulated",
        step_ms=options.step_ms,
        workers=2,
        gateways=2,
        settings={"worker": {"HEADRACE_MAX_NUM_SEQS": "128"}},  # 200 streams run at once
    ) as bench:
        for name in options.only:
            fault, load, to_restart = _FAULTS[name]
            report(f"{name}: {load.streams} streams of {load.tokens} tokens")
            figures[name] = await inflict(bench.stack, bench.api_key, fault, load)
            report(str(figures[name]))
            for process in to_restart:
                await bench.stack.restart(process)
    return figures
