"""Prefill and decode apart: what the handoff of a request's KV costs.

`--only transfer`: bytes alone, between two processes by the transfer engine over TCP.
"""

import argparse
from collections.abc import Callable
from typing import Any

from infra.benchmarks import transfer

_PARTS = {"transfer": transfer.measure}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=sorted(_PARTS), help="one part of it")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, measure in _PARTS.items():
        if options.only in (None, name):
            figures |= await measure(report)
    return figures
