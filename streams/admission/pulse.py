"""Every 100 ms: the heartbeat, what time brings, the figures, and the decisions made since."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from schemas import topics
from schemas.codec import encode
from schemas.fleet import HEARTBEAT_INTERVAL_S
from schemas.priority import PriorityClass
from schemas.records import Heartbeat
from streams.admission.admission import Admission
from streams.admission.dispatcher import Dispatcher
from streams.admission.followers import ROLE
from streams.admission.metrics import Metrics

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 2.0


class Producer(Protocol):
    """The part of AIOKafkaProducer that is needed."""

    async def send(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, partition: int | None = None
    ) -> Any: ...


class AckOverdueError(RuntimeError):
    """The broker has not acked a send for too long."""


async def beat(
    producer: Producer, admission: Admission, slot: int, epoch: int, nonce: bytes, address: str
) -> None:
    """Sends heartbeats. One that the broker does not take in time is left out."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        heartbeat = Heartbeat(
            ROLE, slot, epoch, nonce, address=address, partitions=admission.partition_statuses()
        )
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                future = await producer.send(topics.HEARTBEATS, encode(heartbeat), partition=0)
            future.add_done_callback(_ignore)
        except Exception as error:
            log.warning("no heartbeat: %r", error)
        due = max(due + HEARTBEAT_INTERVAL_S, loop.time())
        await asyncio.sleep(due - loop.time())


async def keep_time(
    admission: Admission,
    dispatcher: Dispatcher,
    metrics: Metrics,
    clock: Callable[[], int],
    ack_deadline_s: float,
) -> None:
    """Ticks. Raises AckOverdueError when a send waits for its ack longer than `ack_deadline_s`."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        dispatcher.put(admission.tick(clock()))
        for priority in PriorityClass:
            metrics.queued[priority].set(admission.num_queued(priority))
        metrics.workers.set(admission.num_workers)
        metrics.decisions_lost.set(admission.decisions.num_lost)
        if (age := dispatcher.oldest_unacked_s()) > ack_deadline_s:
            raise AckOverdueError(f"the broker has not acked a send for {age:.0f} s")


async def log_decisions(producer: Producer, admission: Admission, shards: int) -> None:
    """Sends the decisions of the last while; what cannot be sent is counted as lost by the log's bound."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        for decision in admission.decisions.drain():
            partition = topics.tenant_partition(
                decision.tenant, decision.priority % topics.NUM_CLASSES, shards
            )
            try:
                future = await producer.send(topics.DECISIONS, encode(decision), partition=partition)
                future.add_done_callback(_ignore)
            except Exception as error:
                log.warning("a decision was not logged: %r", error, extra={"request_id": decision.request_id})


def _ignore(future: Any) -> None:
    # Retrieved, so that a failure is not reported as never looked at; nothing depends on it.
    if not future.cancelled():
        future.exception()
