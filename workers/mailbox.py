"""What comes in: dispatches to this slot, and news of the slot itself."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from schemas import headers, topics
from schemas.codec import CodecError, UnknownSchemaError, decode, default_codec
from schemas.fleet import FleetEvent
from schemas.handoff_records import Message
from schemas.headers import ReplyTo
from schemas.priority import PriorityClass
from schemas.records import Dispatch, Join

log = logging.getLogger(__name__)

_SCHEMAS_S = 2.0


class SupersededError(RuntimeError):
    """Another process has joined in this slot: it is the slot's run now."""


class Receiver(Protocol):
    """Who acts on what the mailbox reads. Nothing here may wait."""

    def on_dispatch(self, dispatch: Dispatch, traceparent: str | None) -> None: ...

    def on_read(self, priority: PriorityClass, next_offset: int) -> None:
        """All dispatches of a class below `next_offset` were handed over."""

    def on_undecodable(self, record: ConsumerRecord, to: ReplyTo | None, error: CodecError) -> None:
        """A dispatch or message that cannot be decoded; its headers may say whose it is."""

    def on_handoff(self, message: Message, traceparent: str | None) -> None:
        """Of another worker, about KV that comes or goes."""

    def on_fleet_event(self, event: FleetEvent, offset: int) -> None:
        """Some process joined, drains or left."""


class Mailbox:
    """Reads the slot's prefill partitions, the fleet's events and the schemas of all who write, assigned by
    hand.

    One consumer for all: whatever comes first ends the one fetch that waits at the broker. There are few
    partitions, for a fetch and its answer name them all: each adds to the cost of a record, some 20 us here
    and 40 at the broker (measured with 5 and 17 partitions, on two busy cores).
    """

    def __init__(self, consumer: AIOKafkaConsumer, slot: int, *, hands_over: bool = False) -> None:
        """`hands_over`: it reads what other workers say about handoffs, too."""
        self._consumer = consumer
        self._slot = slot
        decode = topics.slot_partitions(slot) if hands_over else ()
        self._decode = [TopicPartition(topics.DECODE, p) for p in decode]
        self._prefill = [TopicPartition(topics.PREFILL, p) for p in topics.slot_partitions(slot)]
        self._events = TopicPartition(topics.EVENTS, 0)
        self._schemas = TopicPartition(topics.SCHEMAS, 0)
        self._takes_dispatches = True

    async def open(self) -> tuple[int, ...]:
        """Learns the schemas that there are and takes up its places at the ends of the other partitions;
        returns those of the dispatches, by class.

        To be called before Join: what is dispatched to the new epoch lies behind these offsets.
        """
        partitions = [*self._prefill, *self._decode, self._events]
        beginning = await self._consumer.beginning_offsets([self._schemas])
        places = beginning | await self._consumer.end_offsets(partitions)
        # Nothing may run between these lines: a partition without a place is an error to the consumer.
        self._consumer.assign(list(places))
        for partition, offset in places.items():
            self._consumer.seek(partition, offset)
        await self._catch_up_with_schemas()
        return tuple(places[partition] for partition in self._prefill)

    def close_door(self) -> None:
        """No more dispatches are read; events, and what is said about handoffs, still are."""
        self._takes_dispatches = False
        self._consumer.pause(*self._prefill)

    async def run(self, epoch: int, receiver: Receiver) -> None:
        """Hands over what comes, for ever.

        Raises SupersededError, and aiokafka's OffsetOutOfRangeError when it was away for longer than the
        topics keep: both mean to leave and join again.
        """
        while True:
            fetched = await self._consumer.getmany(timeout_ms=1000)
            for partition, records in sorted(fetched.items(), key=_reading_order):
                if partition.topic == topics.PREFILL:
                    await self._read_dispatches(partition, records, receiver)
                elif partition.topic == topics.DECODE:
                    await self._read_messages(records, receiver)
                elif partition.topic == topics.SCHEMAS:
                    _learn(records)
                else:
                    await self._read_events(records, epoch, receiver)
            await asyncio.sleep(0)  # getmany does not yield while it has records at hand

    async def _read_dispatches(
        self, partition: TopicPartition, records: Sequence[ConsumerRecord], receiver: Receiver
    ) -> None:
        if not self._takes_dispatches:
            return
        for record in records:
            try:
                dispatch = await self.decode(record)
                if not isinstance(dispatch, Dispatch):
                    raise CodecError(f"a {type(dispatch).__name__} record in a mailbox for dispatches")
            except CodecError as error:
                receiver.on_undecodable(record, headers.reply_to(record.headers), error)
            else:
                receiver.on_dispatch(dispatch, headers.traceparent(record.headers))
        receiver.on_read(topics.priority_of(partition.partition), records[-1].offset + 1)

    async def _read_messages(self, records: Sequence[ConsumerRecord], receiver: Receiver) -> None:
        for record in records:
            try:
                message = await self.decode(record)
                if not isinstance(message, Message):
                    raise CodecError(f"a {type(message).__name__} record in a mailbox for handoffs")
            except CodecError as error:
                receiver.on_undecodable(record, headers.reply_to(record.headers), error)
            else:
                receiver.on_handoff(message, headers.traceparent(record.headers))

    async def _read_events(self, records: Sequence[ConsumerRecord], epoch: int, receiver: Receiver) -> None:
        for record in records:
            try:
                event = await self.decode(record)
            except CodecError as error:
                log.warning("a fleet event cannot be decoded", extra=where(record, error))
                continue
            if (
                isinstance(event, Join)
                and (event.role, event.slot) == ("worker", self._slot)
                and record.offset > epoch
            ):
                raise SupersededError(
                    f"epoch {record.offset} has joined in slot {self._slot}, this is {epoch}"
                )
            if isinstance(event, FleetEvent):
                receiver.on_fleet_event(event, record.offset)

    async def decode(self, record: ConsumerRecord) -> Any:
        """The record, which may be a newer writer's; of any partition, in any task. Raises CodecError."""
        value = record.value or b""
        try:
            return decode(value)
        except UnknownSchemaError:
            # A newer writer's. It said its schemas before, but on another partition: that may be behind.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SCHEMAS_S):
                    await self._catch_up_with_schemas()
            return decode(value)

    async def _catch_up_with_schemas(self) -> None:
        end = (await self._consumer.end_offsets([self._schemas]))[self._schemas]
        while await self._consumer.position(self._schemas) < end:
            for records in (await self._consumer.getmany(self._schemas, timeout_ms=100)).values():
                _learn(records)


def _reading_order(item: tuple[TopicPartition, object]) -> bool:
    """Schemas first: others need them, and `position` says at once that they were read."""
    return bool(item[0].topic != topics.SCHEMAS)


def _learn(records: Sequence[ConsumerRecord]) -> None:
    for record in records:
        try:
            default_codec().learn((record.value or b"").decode(errors="replace"))
        except CodecError as error:
            log.warning("a schema in control.schemas is of no use", extra=where(record, error))


def where(record: ConsumerRecord, error: CodecError) -> dict[str, object]:
    """Which record it was, for a line of the log."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "error": str(error),
    }
