"""What comes in: dispatches to this slot, cancellations, and news of the slot itself."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from schemas import headers, topics
from schemas.codec import CodecError, decode
from schemas.headers import ReplyTo
from schemas.priority import PriorityClass
from schemas.records import Cancellation, Dispatch, Join

log = logging.getLogger(__name__)


class SupersededError(RuntimeError):
    """Another process has joined in this slot: it is the slot's run now."""


class Receiver(Protocol):
    """Who acts on what the mailbox reads. Nothing here may wait."""

    def on_dispatch(self, dispatch: Dispatch, traceparent: str | None) -> None: ...

    def on_read(self, priority: PriorityClass, next_offset: int) -> None:
        """All dispatches of a class below `next_offset` were handed over."""

    def on_cancellation(self, cancellation: Cancellation) -> None: ...

    def on_undecodable(self, record: ConsumerRecord, to: ReplyTo | None, error: CodecError) -> None:
        """A dispatch that cannot be decoded; its headers may say whose it is."""


class Mailbox:
    """Reads the slot's prefill partitions, all cancellations and the fleet's events, assigned by hand.

    One consumer for all: whatever comes first ends the one fetch that waits at the broker.
    """

    def __init__(self, consumer: AIOKafkaConsumer, slot: int, shards: int) -> None:
        self._consumer = consumer
        self._slot = slot
        self._prefill = [TopicPartition(topics.PREFILL, p) for p in topics.slot_partitions(slot)]
        self._cancellations = [
            TopicPartition(topics.CANCELLATIONS, p) for p in range(shards * topics.NUM_CLASSES)
        ]
        self._events = TopicPartition(topics.EVENTS, 0)
        self._takes_dispatches = True

    async def open(self) -> tuple[int, ...]:
        """Takes up its places at the ends of all partitions; returns those of the dispatches, by class.

        To be called before Join: what is dispatched to the new epoch lies behind these offsets.
        """
        partitions = [*self._prefill, *self._cancellations, self._events]
        ends = await self._consumer.end_offsets(partitions)
        # Nothing may run between these lines: a partition without a place is an error to the consumer.
        self._consumer.assign(partitions)
        for partition, end in ends.items():
            self._consumer.seek(partition, end)
        return tuple(ends[partition] for partition in self._prefill)

    def close_door(self) -> None:
        """No more dispatches are read; cancellations and events still are."""
        self._takes_dispatches = False
        self._consumer.pause(*self._prefill)

    async def run(self, epoch: int, receiver: Receiver) -> None:
        """Hands over what comes, for ever.

        Raises SupersededError, and aiokafka's OffsetOutOfRangeError when it was away for longer than the
        topics keep: both mean to leave and join again.
        """
        while True:
            fetched = await self._consumer.getmany(timeout_ms=1000)
            # Cancellations first: one that came with its dispatch saves the prefill.
            for partition, records in sorted(
                fetched.items(), key=lambda item: item[0].topic != topics.CANCELLATIONS
            ):
                if partition.topic == topics.PREFILL:
                    self._read_dispatches(partition, records, receiver)
                elif partition.topic == topics.CANCELLATIONS:
                    self._read_cancellations(records, receiver)
                else:
                    self._read_events(records, epoch)
            await asyncio.sleep(0)  # getmany does not yield while it has records at hand

    def _read_dispatches(
        self, partition: TopicPartition, records: Sequence[ConsumerRecord], receiver: Receiver
    ) -> None:
        if not self._takes_dispatches:
            return
        for record in records:
            try:
                dispatch = decode(record.value or b"")
                if not isinstance(dispatch, Dispatch):
                    raise CodecError(f"a {type(dispatch).__name__} record in a mailbox for dispatches")
            except CodecError as error:
                receiver.on_undecodable(record, headers.reply_to(record.headers), error)
            else:
                receiver.on_dispatch(dispatch, headers.traceparent(record.headers))
        receiver.on_read(topics.priority_of(partition.partition), records[-1].offset + 1)

    def _read_cancellations(self, records: Sequence[ConsumerRecord], receiver: Receiver) -> None:
        for record in records:
            try:
                cancellation = decode(record.value or b"")
            except CodecError as error:
                log.warning("a cancellation cannot be decoded", extra=_where(record, error))
                continue
            if isinstance(cancellation, Cancellation):
                receiver.on_cancellation(cancellation)

    def _read_events(self, records: Sequence[ConsumerRecord], epoch: int) -> None:
        for record in records:
            try:
                event = decode(record.value or b"")
            except CodecError as error:
                log.warning("a fleet event cannot be decoded", extra=_where(record, error))
                continue
            if (
                isinstance(event, Join)
                and (event.role, event.slot) == ("worker", self._slot)
                and record.offset > epoch
            ):
                raise SupersededError(
                    f"epoch {record.offset} has joined in slot {self._slot}, this is {epoch}"
                )


def _where(record: ConsumerRecord, error: CodecError) -> dict[str, object]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "error": str(error),
    }
