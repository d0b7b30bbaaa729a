"""`./infra/bench NAME [options]`: runs a benchmark and prints its figures as JSON on the last line."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from infra.benchmarks import (
    admission,
    batch,
    billing,
    disaggregation,
    engine,
    failover,
    gateway,
    http,
    idle_streams,
    kernels,
    overhead,
    simulator,
    takeover,
)

_BENCHMARKS: dict[str, Any] = {
    "overhead": overhead,
    "http": http,
    "engine": engine,
    "gateway": gateway,
    "admission": admission,
    "batch": batch,
    "billing": billing,
    "disaggregation": disaggregation,
    "failover": failover,
    "idle_streams": idle_streams,
    "kernels": kernels,
    "simulator": simulator,
    "takeover": takeover,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="infra/bench", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in _BENCHMARKS.items():
        summary = module.__doc__.partition("\n")[0]
        module.add_options(
            names.add_parser(
                name,
                help=summary,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    options = parser.parse_args()
    report: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True)  # noqa: E731
    figures = uvloop.run(_BENCHMARKS[options.name].run(options, report))
    print(json.dumps({"benchmark": options.name, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
