"""The topics read by hand beside Faust: control, fleet events, heartbeats, usage. Each is one task."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from schemas import topics
from schemas.codec import CodecError, decode, default_codec
from schemas.records import Drain, Heartbeat, Join, Left, Tenant, Usage
from streams.admission.actions import Action
from streams.admission.admission import Admission

log = logging.getLogger(__name__)

ROLE = "admission"
POLL_MS = 1_000
# Usage rows so old at takeover still tell how full a bucket of one minute is.
USAGE_WINDOW_MS = 60_000
USAGE_POLL_MS = 250


class Consumer(Protocol):
    """The part of AIOKafkaConsumer that is needed; `Any` stands for its TopicPartition and record."""

    def assign(self, partitions: list[Any]) -> None: ...
    def seek(self, partition: Any, offset: int) -> None: ...
    async def position(self, partition: Any) -> int: ...
    async def getmany(self, *, timeout_ms: int = 0) -> dict[Any, list[Any]]: ...
    async def beginning_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]: ...
    async def end_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]: ...
    async def offsets_for_times(self, timestamps: dict[Any, int]) -> dict[Any, Any]: ...


class SupersededError(RuntimeError):
    """A younger process has this slot."""


class FleetReader:
    """Feeds heartbeats and fleet events to admission, and knows who this process is."""

    def __init__(
        self,
        admission: Admission,
        put: Callable[[Iterable[Action]], None],
        clock: Callable[[], int],
        slot: int,
    ) -> None:
        self._admission = admission
        self._put = put
        self._clock = clock
        self._slot = slot
        self.epoch: int | None = None
        self.heard_itself = False

    def joined(self, epoch: int) -> None:
        """From now on a higher epoch in this slot raises SupersededError."""
        self.epoch = epoch
        self._admission.fleet.watch_as(ROLE, self._slot, epoch)
        self._check_slot()

    def on_heartbeats(self, records: Iterable[Any]) -> None:
        """A batch of fleet.heartbeats."""
        for record in records:
            heartbeat = _decoded(record, Heartbeat)
            if heartbeat is None:
                continue
            self._admission.on_heartbeat(heartbeat, record.timestamp)
            if heartbeat.role == ROLE:
                self._on_admission(heartbeat)
        self._check_slot()
        self._put(self._admission.fleet_changed(self._clock()))

    def on_events(self, records: Iterable[Any]) -> None:
        """A batch of fleet.events."""
        for record in records:
            event = _decoded(record, Join, Drain, Left)
            if event is not None:
                self._admission.on_event(event, record.offset)
        self._check_slot()
        self._put(self._admission.fleet_changed(self._clock()))

    def _on_admission(self, heartbeat: Heartbeat) -> None:
        if (heartbeat.slot, heartbeat.epoch) == (self._slot, self.epoch):
            self.heard_itself = True
        elif lost := self._admission.on_other_admission(heartbeat.partitions, self._clock()):
            log.warning("admission %d took over partitions %s", heartbeat.slot, lost)

    def _check_slot(self) -> None:
        newest = self._admission.fleet.epoch_of(ROLE, self._slot)
        if self.epoch is not None and newest is not None and newest > self.epoch:
            raise SupersededError(f"epoch {newest} has slot {self._slot}, this process is {self.epoch}")


class ControlFollower:
    """control.schemas, control.tenants and fleet.events, from their beginning."""

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        admission: Admission,
        fleet: FleetReader,
        clock: Callable[[], int],
    ) -> None:
        self._consumer = consumer
        self._admission = admission
        self._fleet = fleet
        self._clock = clock
        self._schemas = partition(topics.SCHEMAS, 0)
        self._all = [self._schemas, partition(topics.TENANTS, 0), partition(topics.EVENTS, 0)]
        self._moved = asyncio.Event()

    async def read_to_end(self) -> None:
        """Returns when all that was there is applied. The caller sets a deadline."""
        self._consumer.assign(self._all)
        for partition, offset in (await self._consumer.beginning_offsets(self._all)).items():
            self._consumer.seek(partition, offset)
        for partition, end in (await self._consumer.end_offsets(self._all)).items():
            while await self._consumer.position(partition) < end:
                self._apply(await self._consumer.getmany(timeout_ms=POLL_MS))

    async def run(self) -> None:
        while True:
            self._apply(await self._consumer.getmany(timeout_ms=POLL_MS))

    async def catch_up_schemas(self, timeout: float = 2.0) -> None:
        """Returns when `run` has read what control.schemas holds now, or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                end = (await self._consumer.end_offsets([self._schemas]))[self._schemas]
                while await self._consumer.position(self._schemas) < end:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            log.warning("control.schemas was not read to its end in %.1f s", timeout)

    def _apply(self, batch: dict[Any, list[Any]]) -> None:
        for partition, records in batch.items():
            if partition.topic == topics.EVENTS:
                self._fleet.on_events(records)
            elif partition.topic == topics.TENANTS:
                for record in records:
                    self._on_tenant(record)
            else:
                for record in records:
                    self._on_schema(record)
        self._moved.set()

    def _on_tenant(self, record: Any) -> None:
        name = (record.key or b"").decode(errors="replace")
        tenant = None if record.value is None else _decoded(record, Tenant)
        if tenant is None and record.value is not None:
            return
        try:
            self._admission.on_tenant(name, tenant, self._clock())
        except ValueError as error:
            log.warning("control.tenants offset %d: %s", record.offset, error)

    @staticmethod
    def _on_schema(record: Any) -> None:
        try:
            default_codec().learn((record.value or b"").decode(errors="replace"))
        except CodecError as error:
            log.warning("control.schemas offset %d: %s", record.offset, error)


async def follow_heartbeats(
    consumer: Consumer, partition: Callable[[str, int], Any], fleet: FleetReader
) -> None:
    """Reads fleet.heartbeats from now on."""
    heartbeats = partition(topics.HEARTBEATS, 0)
    consumer.assign([heartbeats])
    consumer.seek(heartbeats, (await consumer.end_offsets([heartbeats]))[heartbeats])
    while True:
        batch = await consumer.getmany(timeout_ms=POLL_MS)
        if batch:
            fleet.on_heartbeats(batch[heartbeats])


class UsageFollower:
    """inference.usage: the same partitions that are held of inference.requests."""

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        admission: Admission,
        put: Callable[[Iterable[Action]], None],
        clock: Callable[[], int],
    ) -> None:
        self._consumer = consumer
        self._partition = partition
        self._admission = admission
        self._put = put
        self._clock = clock
        self._assigned: set[Any] = set()
        self._changed = asyncio.Event()

    def assignment_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            if not self._assigned:
                await self._changed.wait()
            if self._changed.is_set():
                self._changed.clear()
                await self._assign()
            for records in (await self._consumer.getmany(timeout_ms=USAGE_POLL_MS)).values():
                for record in records:
                    usage = _decoded(record, Usage)
                    if usage is not None:
                        self._put(self._admission.on_usage(usage, self._clock()))

    async def _assign(self) -> None:
        wanted = {self._partition(topics.USAGE, p) for p in self._admission.takeover.partitions()}
        offsets = {p: await self._consumer.position(p) for p in wanted & self._assigned}
        fresh = wanted - self._assigned
        if fresh:
            # 1. Where there is nothing so young, begin at the end.
            offsets |= await self._consumer.end_offsets(fresh)
            # 2. What the tenants used in the last minute fills the buckets of a process that has just come.
            since = self._clock() - USAGE_WINDOW_MS
            found = await self._consumer.offsets_for_times(dict.fromkeys(fresh, since))
            offsets |= {p: place.offset for p, place in found.items() if place is not None}
        self._consumer.assign(list(wanted))
        for partition, offset in offsets.items():
            self._consumer.seek(partition, offset)
        self._assigned = wanted


def _decoded(record: Any, *kinds: type) -> Any:
    """The record, or None with a word in the log: one that cannot be read must not stop its reader."""
    try:
        value = decode(record.value or b"")
    except CodecError as error:
        log.warning("%s partition %d offset %d: %s", record.topic, record.partition, record.offset, error)
        return None
    if isinstance(value, kinds):
        return value
    log.warning("%s offset %d holds a %s", record.topic, record.offset, type(value).__name__)
    return None
