"""Every 100 ms: what time brings, the figures, and the decisions made since."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from schemas import topics
from schemas.codec import CodecError, encode
from schemas.fleet import HEARTBEAT_INTERVAL_S
from schemas.priority import PriorityClass
from streams.admission.admission import Admission
from streams.admission.dispatcher import Dispatcher
from streams.admission.metrics import Metrics

log = logging.getLogger(__name__)


class Producer(Protocol):
    """The part of AIOKafkaProducer that is needed."""

    def create_batch(self) -> Any: ...
    async def send_batch(self, batch: Any, topic: str, *, partition: int) -> Any: ...


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
    """Hands those that are held to the producer, by partition: one by one each costs 25 µs more."""
    held: dict[int, list[bytes]] = {}
    for decision in admission.decisions.drain():
        partition = topics.tenant_partition(decision.tenant, decision.priority % topics.NUM_CLASSES, shards)
        try:
            held.setdefault(partition, []).append(encode(decision))
        except CodecError as error:
            log.warning("a decision was not logged: %r", error, extra={"request_id": decision.request_id})
    for partition, values in held.items():
        try:
            await _send_together(producer, partition, values)
        except Exception as error:
            log.warning("decisions were not logged: %r", error, extra={"partition": partition})


async def _send_together(producer: Producer, partition: int, values: Iterable[bytes]) -> None:
    batch = producer.create_batch()
    for value in values:
        if batch.append(key=None, value=value, timestamp=None) is None:
            await _send_batch(producer, batch, partition)
            batch = producer.create_batch()
            batch.append(key=None, value=value, timestamp=None)
    await _send_batch(producer, batch, partition)


async def _send_batch(producer: Producer, batch: Any, partition: int) -> None:
    batch.close()  # nothing is to come, so it does not linger
    if batch.record_count():
        future = await producer.send_batch(batch, topics.DECISIONS, partition=partition)
        future.add_done_callback(_ignore)


def _ignore(future: Any) -> None:
    # Retrieved, so that a failure is not reported as never looked at; nothing depends on it.
    if not future.cancelled():
        future.exception()
