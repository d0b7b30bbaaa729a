"""What a gateway reads from Kafka, by hand: no group, no committed offsets.

Three consumers, for three ways of waiting: the reply partitions at once; heartbeats in batches of 100 ms,
for there are many; events and control records, which are rare, at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.auth import TenantBook
from gateway.owner import reply_partitions
from schemas import topics
from schemas.codec import CodecError, UnknownSchemaError, default_codec
from schemas.control_log import ControlLog
from schemas.fleet import BUSY_CONSUMER_SETTINGS, CONSUMER_SETTINGS, FleetView
from schemas.kafka_login import client_settings
from schemas.records import (
    Admitted,
    Attach,
    Cancellation,
    Claim,
    Completion,
    Detach,
    Dispatched,
    Drain,
    Duplicate,
    Failed,
    Heartbeat,
    Join,
    Left,
    Model,
    Rejected,
    Retry,
    Tenant,
    Tokens,
)
from schemas.stop_client import stop_client
from schemas.stream_state import ReplyRecord
from schemas.topic_check import check_topics

log = logging.getLogger(__name__)

_POLL_MS = 1_000
_STOP_S = 5.0
_SCHEMA_WAIT_S = 1.0
_CATCH_UP_S = 2.0
_LOOK_S = 0.02
_HEARTBEAT_BATCH = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 100}
_SCHEMAS = TopicPartition(topics.SCHEMAS, 0)
_TENANTS = TopicPartition(topics.TENANTS, 0)
_MODELS = TopicPartition(topics.MODELS, 0)
_EVENTS = TopicPartition(topics.EVENTS, 0)
_HEARTBEATS = TopicPartition(topics.HEARTBEATS, 0)
_REPLY_RECORDS = (
    Admitted,
    Dispatched,
    Completion,
    Rejected,
    Retry,
    Failed,
    Claim,
    Attach,
    Detach,
    Cancellation,
    Duplicate,
)

OnTokens = Callable[[Tokens, int, float], None]
OnRecord = Callable[[ReplyRecord | Cancellation | Duplicate, int], None]


class LogTruncatedError(RuntimeError):
    """Records were deleted before they were read: the process must start anew."""


class TokenLog:
    """Feeds `view` and `tenants`, and the reply partitions' records to the callbacks.

    `on_tokens(record, broker time ms, monotonic s)`, `on_record(record, broker time ms)`, `on_model(id, None
    where it was taken back)`, `on_undecodable(topic)`. `on_each`, while there is one, gets all of the reply
    partitions again, with where they lie. `heard_at`: when heartbeats last came (monotonic seconds).
    """

    def __init__(
        self,
        bootstrap_servers: str,
        slot: int,
        view: FleetView,
        tenants: TenantBook,
        on_model: Callable[[str, Model | None], None],
        on_undecodable: Callable[[str], None],
    ) -> None:
        self._view = view
        self._tenants = tenants
        self._on_model = on_model
        self._control_logs = {topics.TENANTS: ControlLog(), topics.MODELS: ControlLog()}
        self._on_undecodable = on_undecodable
        self._codec = default_codec()
        self._learned = asyncio.Event()
        self._control_moved = asyncio.Event()
        self.fleet_moved = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked_at = -1.0
        self.heard_at = 0.0
        self.on_each: Callable[[object, ConsumerRecord], None] | None = None
        self._reply_offsets: dict[int, int] = {}
        self._replies = [TopicPartition(topics.TOKENS, p) for p in reply_partitions(slot)]
        self._tokens = AIOKafkaConsumer(**client_settings(bootstrap_servers), **BUSY_CONSUMER_SETTINGS)
        self._control = AIOKafkaConsumer(**client_settings(bootstrap_servers), **CONSUMER_SETTINGS)
        self._heartbeats = AIOKafkaConsumer(
            **client_settings(bootstrap_servers), **{**CONSUMER_SETTINGS, **_HEARTBEAT_BATCH}
        )

    async def start(self, reply_offsets: dict[TopicPartition, int]) -> None:
        """Begins the reply partitions there and the rest at the end; reads all of control to its end.

        Take the offsets before Join: what is answered to this life of the slot then lies behind. The caller
        sets a deadline. Raises KafkaError, MissingTopicsError.
        """
        for consumer in (self._tokens, self._control, self._heartbeats):
            await consumer.start()
        await check_topics(self._control, topics.NEEDED["gateway"])
        self._assign_at(self._tokens, reply_offsets)
        self._reply_offsets = {p.partition: offset for p, offset in reply_offsets.items()}
        await self._follow_from_end(self._heartbeats, [_HEARTBEATS])
        await self._read_control()

    async def stop(self) -> None:
        for consumer in (self._tokens, self._control, self._heartbeats):
            await stop_client(consumer, _STOP_S)

    def reply_offset(self, partition: int) -> int:
        """In a reply partition of this gateway: what lies before it was given to the callbacks."""
        return self._reply_offsets[partition]

    async def follow_replies(self, on_tokens: OnTokens, on_record: OnRecord) -> None:
        """Reads the reply partitions for ever. Raises LogTruncatedError."""
        while True:
            for messages in await self._poll(self._tokens):
                now = time.monotonic()
                for message in messages:
                    record = await self.decode(message)
                    if type(record) is Tokens:
                        on_tokens(record, message.timestamp, now)
                    elif isinstance(record, _REPLY_RECORDS):
                        on_record(record, message.timestamp)
                    if self.on_each is not None:
                        self.on_each(record, message)
                self._reply_offsets[messages[-1].partition] = messages[-1].offset + 1

    async def at_reply_end(self) -> None:
        """Returns when all that lies in the reply partitions now was given. The caller sets a deadline."""
        ends = await self._tokens.end_offsets(self._replies)
        while any(self._reply_offsets[p.partition] < end for p, end in ends.items()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)  # rare: no event on the path of every record

    async def follow_heartbeats(self) -> None:
        while True:
            for messages in await self._poll(self._heartbeats):
                self.heard_at = time.monotonic()
                for message in messages:
                    record = await self.decode(message)
                    if isinstance(record, Heartbeat):
                        self._view.on_heartbeat(record, message.timestamp)

    async def follow_control(self) -> None:
        while True:
            # Schemas first: what came with them may be of a newer writer.
            batches = await self._poll(self._control)
            for messages in sorted(batches, key=lambda batch: batch[0].topic != topics.SCHEMAS):
                for message in messages:
                    self._on_control(message)
            self._control_moved.set()

    async def catch_up_tenants(self) -> None:
        """Returns when all tenants that were written before this call are read, or after 2 s.

        Asked when a key is not known, so that a tenant is served from the moment its creation is acked. Calls
        that come while another looks share the next look.
        """
        asked_at = time.monotonic()
        async with self._looking:
            if self._looked_at >= asked_at:
                return
            self._looked_at = time.monotonic()
            with suppress(TimeoutError, KafkaError):
                async with asyncio.timeout(_CATCH_UP_S):
                    end = (await self._control.end_offsets([_TENANTS]))[_TENANTS]
                    while await self._control.position(_TENANTS) < end:
                        self._control_moved.clear()
                        await self._control_moved.wait()

    async def _read_control(self) -> None:
        partitions = [_SCHEMAS, _TENANTS, _MODELS]
        ends = await self._control.end_offsets([*partitions, _EVENTS])
        beginnings = await self._control.beginning_offsets(partitions)
        self._assign_at(self._control, {**beginnings, _EVENTS: ends[_EVENTS]})
        # Schemas first: a tenant's record may be of a newer writer.
        for partition in partitions:
            while await self._control.position(partition) < ends[partition]:
                for messages in (await self._control.getmany(partition, timeout_ms=_POLL_MS)).values():
                    for message in messages:
                        self._on_control(message)

    async def _follow_from_end(
        self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, int]:
        ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
        self._assign_at(consumer, ends)
        return ends

    def _assign_at(self, consumer: AIOKafkaConsumer, offsets: dict[TopicPartition, int]) -> None:
        # With nothing awaited in between: a partition without a place is an error to the consumer.
        consumer.assign(list(offsets))
        for partition, offset in offsets.items():
            consumer.seek(partition, offset)

    def _on_control(self, message: ConsumerRecord) -> None:
        if message.topic == topics.SCHEMAS:
            try:
                self._codec.learn((message.value or b"").decode())
                self._learned.set()
            except (CodecError, UnicodeDecodeError) as e:
                self._report(message, e)
            return
        if (control_log := self._control_logs.get(message.topic)) is not None:
            name = (message.key or b"").decode("utf-8", "replace")
            if control_log.counts(name, message.offset, message.headers, message.value is None):
                self._on_named(name, message)
            return
        event = self._try_decode(message)
        if isinstance(event, Join | Drain | Left):
            self._view.on_event(event, message.offset)
            self.fleet_moved.set()

    def _on_named(self, name: str, message: ConsumerRecord) -> None:
        record = None if message.value is None else self._try_decode(message)
        if record is None and message.value is not None:
            return
        if message.topic == topics.MODELS and isinstance(record, Model | None):
            self._on_model(name, record)
        elif message.topic == topics.TENANTS and isinstance(record, Tenant | None):
            try:
                self._tenants.put(name, record)
            except ValueError as e:
                self._report(message, e)

    async def _poll(self, consumer: AIOKafkaConsumer) -> Iterable[list[ConsumerRecord]]:
        try:
            batches: dict[TopicPartition, list[ConsumerRecord]] = await consumer.getmany(timeout_ms=_POLL_MS)
        except OffsetOutOfRangeError as e:
            raise LogTruncatedError(f"what was to be read is no longer there: {e}") from e
        return batches.values()

    async def decode(self, message: ConsumerRecord) -> object:
        """As `_try_decode`, but a schema that may be on its way gets a second to arrive."""
        try:
            return self._codec.decode(message.value or b"")
        except UnknownSchemaError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SCHEMA_WAIT_S):
                    while not self._known(message):
                        self._learned.clear()
                        await self._learned.wait()
        except CodecError:
            pass  # reported below, with the same error
        return self._try_decode(message)

    def _try_decode(self, message: ConsumerRecord) -> object:
        """The record, or None for one that cannot be read: counted and logged, and the next one is served."""
        try:
            return self._codec.decode(message.value or b"")
        except CodecError as e:
            self._report(message, e)
            return None

    def _known(self, message: ConsumerRecord) -> bool:
        try:
            self._codec.decode(message.value or b"")
        except UnknownSchemaError:
            return False
        except CodecError:
            pass
        return True

    def _report(self, message: ConsumerRecord, error: Exception) -> None:
        self._on_undecodable(message.topic)
        log.error(
            "a record cannot be used",
            extra={
                "topic": message.topic,
                "partition": message.partition,
                "offset": message.offset,
                "error": str(error),
            },
        )
