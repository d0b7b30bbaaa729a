"""`./infra/chaos --seconds N --seed S`: does one fault after another to a whole stack under mixed load.

Two gateways, two admission processes, a ledger and a standby, three workers. Clients write down what they
were shown: every token is compared with what the model gives, and the bill with both. Printed per fault: the
streams that ran and those that it made wait, their longest gaps, when all went on, retries. The last line is
JSON, the status 0 only if nothing was found.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from infra.chaos_run.faults import faults
from infra.chaos_run.run import chaos_run


async def _until_terminated(run: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """SIGTERM ends it in order too: what was started and mounted is gone then."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="infra/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no fault begins later than this")
    parser.add_argument("--seed", type=int, default=1, help="of the faults' order and of whom they meet")
    parser.add_argument(
        "--deterministic-model",
        action="store_true",
        help="the real model on two workers, not a simulated one",
    )
    parser.add_argument(
        "--disaggregated",
        action="store_true",
        help="a worker for prompts and two that decode, and faults at each step of a handoff",
    )
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="these and no others, in this order")
    parser.add_argument(
        "--brokers",
        type=int,
        choices=(1, 3),
        default=1,
        help="3: all is kept thrice, and one of them is killed",
    )
    parser.add_argument(
        "--clients",
        type=int,
        help="who ask one request after another; by default 20, and 6 of the real model",
    )
    parser.add_argument("--step-ms", type=float, default=15.0, help="of the simulated model")
    parser.add_argument("--list", action="store_true", help="print the faults' names")
    options = parser.parse_args()
    if options.disaggregated and options.deterministic_model:
        parser.error("--disaggregated is for the simulated model")
    known = faults(
        simulated=not options.deterministic_model,
        brokers=options.brokers,
        disaggregated=options.disaggregated,
    )
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"no such fault: {', '.join(unknown)}; --list has all")
    figures = uvloop.run(
        _until_terminated(
            chaos_run(
                lambda message: print(message, file=sys.stderr, flush=True),
                random.Random(options.seed),
                {name: known[name] for name in options.only or known},
                seconds=options.seconds,
                in_order=bool(options.only),
                deterministic_model=options.deterministic_model,
                clients=options.clients or (6 if options.deterministic_model else 20),
                step_ms=options.step_ms,
                brokers=options.brokers,
                disaggregated=options.disaggregated,
            )
        )
    )
    print(json.dumps({"chaos": {"seed": options.seed, "disaggregated": options.disaggregated}, **figures}))
    return 1 if figures["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
