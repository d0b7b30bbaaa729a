"""Every 100 ms: what time brings, the figures, and the decisions made since."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from schemas import topics
from schemas.codec import encode
from schemas.fleet import HEARTBEAT_INTERVAL_S
from schemas.priority import PriorityClass
from streams.admission.admission import Admission
from streams.admission.dispatcher import Dispatcher
from streams.admission.metrics import Metrics

log = logging.getLogger(__name__)


class Producer(Protocol):
    """The part of AIOKafkaProducer that is needed."""

    async def send(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, partition: int | None = None
    ) -> Any: ...


class AckOverdueError(RuntimeError):
    """The broker has not acked a send for too long."""


async def keep_time(
    admission: Admission,
    dispatcher: Dispatcher,
    metrics: Metrics,
    clock: Callable[[], int],
    ack_deadline_s: float,
) -> None:
    """Ticks. Raises AckOverdueError when a send waits for its ack longer than `ack_deadline_s` while the
    broker takes heartbeats."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        dispatcher.put(admission.tick(clock()))
        for priority in PriorityClass:
            metrics.queued[priority].set(admission.num_queued(priority))
        metrics.workers.set(admission.num_workers)
        metrics.first_tokens(admission.overload.outcomes)
        metrics.prefix_hits(admission.hits)
        metrics.routed(admission.router)
        metrics.fallbacks.set(admission.fallback.num_requests)
        metrics.decisions_lost.set(admission.decisions.num_lost)
        if (age := dispatcher.oldest_unacked_s()) > ack_deadline_s:
            raise AckOverdueError(f"the broker has not acked a send for {age:.0f} s")


async def log_decisions(producer: Producer, admission: Admission, shards: int) -> None:
    """Sends the decisions of the last while, for ever; what it cannot send is lost."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        await send_decisions(producer, admission, shards)


async def send_decisions(producer: Producer, admission: Admission, shards: int) -> None:
    """Hands those that are held to the producer."""
    for decision in admission.decisions.drain():
        partition = topics.tenant_partition(decision.tenant, decision.priority % topics.NUM_CLASSES, shards)
        try:
            future = await producer.send(topics.DECISIONS, encode(decision), partition=partition)
            future.add_done_callback(_ignore)
        except Exception as error:
            log.warning("a decision was not logged: %r", error, extra={"request_id": decision.request_id})


def _ignore(future: Any) -> None:
    # Retrieved, so that a failure is not reported as never looked at; nothing depends on it.
    if not future.cancelled():
        future.exception()
