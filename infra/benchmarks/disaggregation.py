"""Prefill and decode apart: what the handoff of a request's KV costs, what streams gain, and when it pays.

`--only transfer`: bytes alone, between two processes by the transfer engine over TCP.

`--only real`: the real model on a prefill and a decode worker, each with a thread: time to the first token
of prompts that are handed over, and of such as run whole in the same process; for how long KV is still being
sent when a prompt is computed; and GB/s while calls run.

`--only simulated`: a fleet of GPUs in virtual time, with the shipped decisions and scheduler. `itl_p99_ms` is
the time between tokens of steady streams while long prompts come, on the same GPUs three ways;
`transfer_visible_ms` is how long the KV of a 70b model's 2,000-token prompt is still being sent when the
prompt is computed, at 50 GB/s; `pool_ratio` compares the ratio that follows from the two rates with half and
half; `one_node` is 8 GPUs both ways, by length of the prompts, load, and inter-token target.
"""

import argparse
from collections.abc import Callable
from typing import Any

from infra.benchmarks import disaggregation_real, disaggregation_simulated, transfer

_PARTS = {
    "transfer": transfer.measure,
    "real": disaggregation_real.measure,
    "simulated": disaggregation_simulated.measure,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=sorted(_PARTS), help="one part of it")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, measure in _PARTS.items():
        if options.only in (None, name):
            figures |= await measure(report)
    return figures
