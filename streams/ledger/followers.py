"""The topics read by hand beside Faust: control, fleet events and heartbeats."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from schemas import topics
from schemas.codec import CodecError, decode, default_codec
from schemas.fleet import FleetView
from schemas.records import Drain, Heartbeat, Join, Left, Tenant
from streams.ledger.source_reader import Consumer

log = logging.getLogger(__name__)

ROLE = "ledger"
_POLL_MS = 1_000


class SupersededError(RuntimeError):
    """A younger process has this slot."""


class Fleet:
    """The view of the fleet, and who this process is in it."""

    def __init__(self, slot: int) -> None:
        self.view = FleetView()
        self._slot = slot
        self._epoch: int | None = None
        self.heard_itself = False

    def joined(self, epoch: int) -> None:
        self._epoch = epoch
        self.view.watch_as(ROLE, self._slot, epoch)

    def on_heartbeats(self, records: Iterable[Any]) -> None:
        for record in records:
            heartbeat = _decoded(record, Heartbeat)
            if heartbeat is not None:
                self.view.on_heartbeat(heartbeat, record.timestamp)
                own = (heartbeat.role, heartbeat.slot, heartbeat.epoch) == (ROLE, self._slot, self._epoch)
                self.heard_itself |= own
        self._check_slot()

    def on_events(self, records: Iterable[Any]) -> None:
        for record in records:
            event = _decoded(record, Join, Drain, Left)
            if event is not None:
                self.view.on_event(event, record.offset)
        self._check_slot()

    def _check_slot(self) -> None:
        newest = self.view.epoch_of(ROLE, self._slot)
        if self._epoch is not None and newest is not None and newest > self._epoch:
            raise SupersededError(f"epoch {newest} has slot {self._slot}, this process is {self._epoch}")


class Control:
    """control.schemas, control.tenants and fleet.events from their beginning. `tenants` by name."""

    def __init__(self, consumer: Consumer, partition: Callable[[str, int], Any], fleet: Fleet) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._consumer, self._fleet = consumer, fleet
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
                self._apply(await self._consumer.getmany(timeout_ms=_POLL_MS))

    async def run(self) -> None:
        while True:
            self._apply(await self._consumer.getmany(timeout_ms=_POLL_MS))

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
                    _on_schema(record)
        self._moved.set()

    def _on_tenant(self, record: Any) -> None:
        name = (record.key or b"").decode(errors="replace")
        if not topics.TENANT_NAME.fullmatch(name):
            log.warning("control.tenants offset %d: key is no tenant's name", record.offset)
        elif record.value is None:
            self.tenants.pop(name, None)
        elif (tenant := _decoded(record, Tenant)) is not None:
            self.tenants[name] = tenant


async def follow_heartbeats(consumer: Consumer, partition: Callable[[str, int], Any], fleet: Fleet) -> None:
    """Reads fleet.heartbeats from now on."""
    heartbeats = partition(topics.HEARTBEATS, 0)
    consumer.assign([heartbeats])
    consumer.seek(heartbeats, (await consumer.end_offsets([heartbeats]))[heartbeats])
    while True:
        for records in (await consumer.getmany(timeout_ms=_POLL_MS)).values():
            fleet.on_heartbeats(records)


def _on_schema(record: Any) -> None:
    try:
        default_codec().learn((record.value or b"").decode(errors="replace"))
    except CodecError as error:
        log.warning("control.schemas offset %d: %s", record.offset, error)


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
