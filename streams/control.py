"""control.schemas, control.tenants and fleet.events, from their beginning."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from schemas import topics
from schemas.codec import CodecError, default_codec
from schemas.records import Tenant
from schemas.tenant_log import TenantLog
from streams.consumer import Consumer, assign_at, decoded
from streams.membership import Membership

log = logging.getLogger(__name__)

_POLL_MS = 1_000


class ControlFollower:
    """`on_tenant(name, tenant)`, with None for a deletion, may raise ValueError: the record is skipped."""

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        membership: Membership,
        on_tenant: Callable[[str, Tenant | None], None],
    ) -> None:
        self._consumer, self._membership, self._on_tenant = consumer, membership, on_tenant
        self._schemas, self._tenants = partition(topics.SCHEMAS, 0), partition(topics.TENANTS, 0)
        self._all = [self._schemas, self._tenants, partition(topics.EVENTS, 0)]
        self._moved = asyncio.Event()
        self._tenant_log = TenantLog()

    async def read_to_end(self) -> None:
        """Returns when all that was there is applied. The caller sets a deadline."""
        ends = await self._consumer.end_offsets(self._all)
        assign_at(self._consumer, await self._consumer.beginning_offsets(self._all))
        # Schemas first: the other records may be of newer writers.
        for partition in self._all:
            while await self._consumer.position(partition) < ends[partition]:
                self._apply(await self._consumer.getmany(partition, timeout_ms=_POLL_MS))

    async def run(self) -> None:
        while True:
            self._apply(await self._consumer.getmany(timeout_ms=_POLL_MS))

    async def catch_up_schemas(self, timeout: float = 2.0) -> None:
        """Returns when `run` has read what control.schemas holds now, or after `timeout` seconds."""
        await self._catch_up(self._schemas, timeout)

    async def catch_up_tenants(self, timeout: float = 2.0) -> None:
        """Returns when `run` has read what control.tenants holds now, or after `timeout` seconds."""
        await self._catch_up(self._tenants, timeout)

    async def _catch_up(self, partition: Any, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                end = (await self._consumer.end_offsets([partition]))[partition]
                while await self._consumer.position(partition) < end:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            log.warning("%s was not read to its end in %.1f s", partition.topic, timeout)

    def _apply(self, batch: dict[Any, list[Any]]) -> None:
        for partition in self._all:
            records = batch.get(partition, [])
            match partition.topic:
                case topics.SCHEMAS:
                    for record in records:
                        _learn(record)
                case topics.TENANTS:
                    for record in records:
                        self._take_tenant(record)
                case topics.EVENTS if records:
                    self._membership.on_events(records)
        self._moved.set()

    def _take_tenant(self, record: Any) -> None:
        name = (record.key or b"").decode(errors="replace")
        if not self._tenant_log.counts(name, record.offset, record.headers, record.value is None):
            return
        tenant = None if record.value is None else decoded(record, Tenant)
        if tenant is None and record.value is not None:
            return
        try:
            self._on_tenant(name, tenant)
        except ValueError as error:
            log.warning("control.tenants offset %d: %s", record.offset, error)


def _learn(record: Any) -> None:
    try:
        default_codec().learn((record.value or b"").decode(errors="replace"))
    except CodecError as error:
        log.warning("control.schemas offset %d: %s", record.offset, error)
