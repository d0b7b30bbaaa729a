"""`python -m infra.chaos_run.failpoints SERVICE [ARGUMENT…]`: a service that can be killed at chosen places.

The services know nothing of it: what happens at these places is put around their own functions here. A point
is armed by a file of its name in the folder CHAOS_ARMED; the first process that comes by takes the file away
and kills itself (SIGKILL, nothing is flushed). The states below last as long as their file.
"""

import asyncio
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.chaos_run.stepped_clock import step_by_file
from schemas.handoff_records import WorkerRole

ARMED = "CHAOS_ARMED"

# Where a process can be killed, and what is not done yet there.
KILLS: dict[str, str] = {
    "admission.dispatch_acked": "Dispatch is acked, Dispatched not sent",
    "admission.dispatched": "Dispatched is acked, the offset of the request not committed",
    "worker.tokens_acked": "all tokens are acked, no usage row sent",
    "worker.usage_acked": "the usage row is acked, Completion not sent",
    "gateway.request_acked": "the request is acked, its client has no answer",
    "ledger.rows_inserted": "rows are in ClickHouse, their offsets not committed",
    "ledger.part_written": "lines of a batch are in the object store, no state speaks of them",
    "ledger.results_committed": "results and offsets are committed, the ledger has not heard so",
}

# Of workers with roles, in the order of a handoff.
HANDOFF_KILLS: dict[str, str] = {
    "worker.unoffered": "a prompt was dispatched to prefill, decode has not heard of it",
    "worker.offered": "the Offer is acked, decode has named no blocks",
    "worker.reserved": "decode's blocks are named to prefill, and it dies that has them",
    "worker.writing": "a call that writes KV begins",
    "worker.written": "a call that wrote KV has returned, decode has not been told",
    "worker.handed_off": "the Handoff is acked, decode has not adopted it",
    "worker.received": "decode has read the Handoff, and not looked at what was written",
    "worker.adopted": "decode has adopted it and said so",
}
ALL_KILLS = KILLS | HANDOFF_KILLS

# A worker's that is as `<state>-<slot>`: its steps take ten times as long, or its tokens are wrong.
SLOW, WRONG = "worker.slow", "worker.wrong_tokens"
# While it lasts no row can be written.
STORE_AWAY = "ledger.store_away"
_SLOWER = 10
# A process's clock is off by as many milliseconds as `<this>-<process>` says.
CLOCK = "clock"
_ROLE = "HEADRACE_WORKER_ROLE"


def _path(name: str) -> Path:
    return Path(os.environ[ARMED]) / name


def pass_point(name: str) -> None:
    """Ends the process here when `name` is armed."""
    with suppress(FileNotFoundError):
        _path(name).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _around(cls: type, name: str, make: Callable[[Any], Any]) -> None:
    """Raises AttributeError where the service has no such function any more."""
    before = getattr(cls, name)
    setattr(cls, name, functools.wraps(before)(make(before)))


def _acked_first(point: str) -> Callable[[Any], Any]:
    """For a callback of an acked send."""

    def make(before: Any) -> Any:
        def callback(self: Any, what: Any, *rest: Any) -> None:
            future = rest[-1]
            if not future.cancelled() and future.exception() is None:
                pass_point(point)
            before(self, what, *rest)

        return callback

    return make


def _then(point: str) -> Callable[[Any], Any]:
    """After a function that was awaited."""

    def make(before: Any) -> Any:
        async def function(*args: Any, **kwargs: Any) -> Any:
            answer = await before(*args, **kwargs)
            pass_point(point)
            return answer

        return function

    return make


def _admission() -> None:
    from schemas.records import Dispatched
    from streams.admission.dispatcher import Dispatcher

    def replied(before: Any) -> Any:
        def callback(self: Any, reply: Any, future: "asyncio.Future[Any]") -> None:
            if isinstance(reply.record, Dispatched) and not future.cancelled() and future.exception() is None:
                pass_point("admission.dispatched")
            before(self, reply, future)

        return callback

    _around(Dispatcher, "_acked", _acked_first("admission.dispatch_acked"))
    _around(Dispatcher, "_replied", replied)


def _ledger() -> None:
    from streams.ledger.clickhouse import BillingStore
    from streams.ledger.job_store import JobStore
    from streams.ledger.results import ResultWriter

    def insert(before: Any) -> Any:
        def function(self: Any, rows: Any) -> None:
            if _path(STORE_AWAY).exists():
                raise ConnectionError("ClickHouse is away: chaos")
            before(self, rows)
            pass_point("ledger.rows_inserted")

        return function

    _around(BillingStore, "insert", insert)
    _around(JobStore, "write", _then("ledger.part_written"))
    _around(ResultWriter, "commit", _then("ledger.results_committed"))


def _gateway() -> None:
    from gateway.outbox import Outbox

    _around(Outbox, "send_request", _then("gateway.request_acked"))


def _worker() -> None:
    from workers.outbox import Outbox
    from workers.simulated_runner import SimulatedRunner

    def send_usage(before: Any) -> Any:
        async def function(*args: Any) -> None:
            pass_point("worker.tokens_acked")
            await before(*args)
            pass_point("worker.usage_acked")

        return function

    slot = os.environ["HEADRACE_SLOT"]

    def execute(before: Any) -> Any:
        def function(self: Any, batch: Any) -> Any:
            began = time.monotonic()
            output = before(self, batch)
            if _path(f"{SLOW}-{slot}").exists():
                time.sleep((time.monotonic() - began) * (_SLOWER - 1))
            if _path(f"{WRONG}-{slot}").exists():
                output.token_ids = [None if t is None else (t + 1) % 127 for t in output.token_ids]
            return output

        return function

    _around(Outbox, "_send_usage", send_usage)
    _around(SimulatedRunner, "execute", execute)


def _handoffs() -> None:
    from schemas import topics
    from schemas.records import Handoff, Offer, Reserved, TransferEnded
    from workers.handoff.decode_side import DecodeSide
    from workers.handoff.mooncake_transport import MooncakeTransport
    from workers.handoff.sender import HandoffSender
    from workers.handoff.states import State

    points = {Offer: "worker.offered", Reserved: "worker.reserved", Handoff: "worker.handed_off"}

    def send(before: Any) -> Any:
        def function(self: Any, message: Any) -> None:
            record = message.record
            if isinstance(record, Offer):
                pass_point("worker.unoffered")
            before(self, message)
            point = points.get(type(record))
            if isinstance(record, TransferEnded) and record.state == State.ADOPTED:
                point = "worker.adopted"
            lane = self._lanes[topics.partition(message.slot, message.priority)]
            acked = lane.last_acked
            if point is not None and acked is not None:
                acked.add_done_callback(functools.partial(passed, point))

        return function

    def passed(point: str, acked: "asyncio.Future[None]") -> None:
        if not acked.cancelled():
            pass_point(point)

    def write(before: Any) -> Any:
        def function(*args: Any) -> None:
            pass_point("worker.writing")
            before(*args)
            pass_point("worker.written")

        return function

    def on_handoff(before: Any) -> Any:
        def function(*args: Any) -> Any:
            pass_point("worker.received")
            return before(*args)

        return function

    _around(HandoffSender, "send", send)
    _around(MooncakeTransport, "write", write)
    _around(DecodeSide, "on_handoff", on_handoff)


def _tell_tasks(number: int, frame: object) -> None:
    """Where everything that is going on stands, for whoever looks why something hangs."""
    for loop in _loops():
        for task in asyncio.all_tasks(loop):
            task.print_stack(limit=12)


def _loops() -> Iterable[asyncio.AbstractEventLoop]:
    return {loop for loop in gc.get_objects() if isinstance(loop, asyncio.AbstractEventLoop)}


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGUSR1, _tell_tasks)
    service, rest = argv[0], argv[1:]
    step_by_file(_path(f"{CLOCK}-{service}-{os.environ['HEADRACE_SLOT']}"))
    if service == "worker":
        from workers.__main__ import main as worker

        if rest:
            _worker()
            if os.environ.get(_ROLE, WorkerRole.UNIFIED) != WorkerRole.UNIFIED:
                _handoffs()
            sys.argv = ["workers", "--child", *rest]
            return worker()
        from schemas import logs
        from workers.config import load_config
        from workers.parent import supervise

        config = load_config(os.environ)
        logs.configure("worker-parent", config.slot, config.log_level)
        # The parent runs this module again as the worker proper.
        return asyncio.run(supervise(config, ["-m", "infra.chaos_run.failpoints", "worker"]))
    if service == "gateway":
        from gateway.__main__ import main as gateway

        _gateway()
        return gateway(rest)
    from streams.__main__ import main as streams

    {"admission": _admission, "ledger": _ledger}[service]()
    return streams(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
