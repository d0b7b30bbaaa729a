"""The small process above a worker: it says that the worker has left, the moment that it dies.

It holds an open producer and little else, and never imports torch, so it outlives what kills the worker.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas import topics
from schemas.codec import encode
from schemas.fleet import LEFT_CANARY_FAILED, LEFT_ENGINE_STALLED, PRODUCER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.lasting_producer import lasting
from schemas.records import Left
from schemas.stop_client import stop_client
from workers.config import WorkerConfig
from workers.connections import start_client
from workers.exit_status import ExitStatus

log = logging.getLogger(__name__)

_LEFT_S = 10.0
_CLOSE_S = 2.0
# Beyond its drain the worker needs this long to tell of it and to close.
_CHILD_EXIT_S = 6.0
# What its owners must know of the end of a run; any other is told by its exit status.
_REASONS: dict[int, str] = {
    ExitStatus.CANARY_FAILED: LEFT_CANARY_FAILED,
    ExitStatus.ENGINE_STALLED: LEFT_ENGINE_STALLED,
}
# OpenMP threads that spin for long at each barrier keep the broker, the gateway and each other off the cores;
# threads that sleep at once are woken at each of the 150 products and passes of a step. So they spin for some
# hundred µs, longer than a step's gaps, and sleep between steps. The products of one decode of Gemma 3 270M
# with such gaps (Xeon, 2 cores, ms): sleeping 20, spinning 1,000 times 18, 10,000 times 12, for ever 10.
#
# A step reads all weights, hundreds of megabytes: in huge pages it is 8 to 10 % faster at any batch.
CHILD_ENV = {"GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"}


async def supervise(config: WorkerConfig, arguments: Sequence[str]) -> int:
    """Runs the worker as a child until it ends; returns the exit status to pass on (128 + n for signal n).

    `arguments` are the child's; the descriptor to write its epoch to and our pid are appended to them.
    """
    read_fd, write_fd = os.pipe()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        str(write_fd),
        str(os.getpid()),
        pass_fds=(write_fd,),
        env=CHILD_ENV | os.environ,
    )
    os.close(write_fd)
    epoch = asyncio.create_task(_read_epoch(read_fd))
    producer = asyncio.create_task(_open_producer(config.kafka))
    ending = _Ending(child, config.drain_s + _CHILD_EXIT_S)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.begin)
    try:
        status = await child.wait()
        reason = _describe(status)
        log.info("the worker has ended", extra={"reason": reason})
        # The pipe ends with the child, so this does not wait.
        run = await epoch
        if run is not None:
            await _say_left(producer, Left("worker", config.slot, run, reason))
        return status if status >= 0 else 128 - status
    finally:
        ending.cancel()
        if child.returncode is None:
            child.kill()
            await child.wait()
        await _close(producer)


class _Ending:
    """SIGTERM now, SIGKILL when the worker is not gone after `patience_s` seconds."""

    def __init__(self, child: asyncio.subprocess.Process, patience_s: float) -> None:
        self._child = child
        self._patience_s = patience_s
        self._kill: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._signal(signal.SIGTERM)
        if self._kill is None:
            loop = asyncio.get_running_loop()
            self._kill = loop.call_later(self._patience_s, self._signal, signal.SIGKILL)

    def cancel(self) -> None:
        if self._kill is not None:
            self._kill.cancel()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)


async def _read_epoch(read_fd: int) -> int | None:
    """The epoch that the worker joined with; None if it ended before."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    return int(line) if line.endswith(b"\n") else None


async def _open_producer(bootstrap_servers: str) -> AIOKafkaProducer:
    """A producer that has all it needs to send to fleet.events at once."""
    producer = await start_client(
        lambda: lasting(AIOKafkaProducer(**client_settings(bootstrap_servers), **PRODUCER_SETTINGS)),
        bootstrap_servers,
    )
    await producer.partitions_for(topics.EVENTS)
    return producer


async def _say_left(producer: "asyncio.Task[AIOKafkaProducer]", left: Left) -> None:
    try:
        async with asyncio.timeout(_LEFT_S):
            await (await asyncio.shield(producer)).send_and_wait(topics.EVENTS, encode(left), partition=0)
        log.info("said Left", extra={"epoch": left.epoch})
    except (KafkaError, TimeoutError) as error:
        # Its silence will tell, a second later.
        log.error("Left was not delivered", extra={"epoch": left.epoch, "error": repr(error)})


async def _close(producer: "asyncio.Task[AIOKafkaProducer]") -> None:
    if not producer.done():
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        return
    if producer.cancelled() or producer.exception() is not None:
        return
    await stop_client(producer.result(), _CLOSE_S)


def _describe(status: int) -> str:
    if status >= 0:
        return _REASONS.get(status) or f"exit {status}"
    return f"signal {signal.Signals(-status).name}"
