"""Reads the request topics of a shard's tenants, no further than there is room for open requests."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from schemas import topics
from streams.consumer import Consumer, assign_at
from streams.ledger.source_window import SourceWindow

log = logging.getLogger(__name__)

SOURCE_PARTITION = 0  # a tenant's topics have one partition
_POLL_MS = 200
_MAX_RECORDS = 64
_MISSING_RETRY_S = 5.0
_TIMEOUT_S = 30.0


class SourceReader:
    """`windows` has every tenant ever read in this life: their open requests outlive the tenant."""

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        committed: Callable[[str, int], Any],
        limit: int,
    ) -> None:
        """`committed` gives (offset, metadata) of the group, or None; `limit` is open requests a tenant."""
        self.windows: dict[str, SourceWindow] = {}
        self._consumer, self._partition, self._committed, self._limit = consumer, partition, committed, limit
        self._asked: set[str] = set()
        self._assigned: set[str] = set()
        self._assigned_at = 0.0
        self._room = asyncio.Event()

    def room_freed(self) -> None:
        self._room.set()

    async def read(self, wanted: set[str]) -> dict[str, list[Any]]:
        """The next records by tenant, for each no more than it has room for. May be none."""
        missing = wanted - self._assigned
        due = time.monotonic() - self._assigned_at > _MISSING_RETRY_S
        if wanted != self._asked or (missing and due):
            await self._assign(wanted)
        ready = {t: room for t in self._assigned if (room := self.windows[t].room(self._limit))}
        if not ready:
            self._room.clear()
            await wait_for(self._room, _POLL_MS / 1000)
            return {}
        batch = await self._consumer.getmany(
            *map(self._tp, ready), timeout_ms=_POLL_MS, max_records=min(_MAX_RECORDS, *ready.values())
        )
        return {topics.tenant_of_batch_topic(tp.topic) or "": records for tp, records in batch.items()}

    def _tp(self, tenant: str) -> Any:
        return self._partition(topics.batch_requests(tenant), SOURCE_PARTITION)

    async def _assign(self, wanted: set[str]) -> None:
        consumer = self._consumer
        async with asyncio.timeout(_TIMEOUT_S):
            there = await consumer.topics()
            present = {tenant for tenant in wanted if topics.batch_requests(tenant) in there}
            if missing := wanted - present:
                log.warning("tenants without batch topics", extra={"tenants": sorted(missing)})
            new = present - self.windows.keys()
            begins = await consumer.beginning_offsets(map(self._tp, new)) if new else {}
            for tenant in new:
                self.windows[tenant] = await self._window(tenant, begins[self._tp(tenant)])
        if present:
            assign_at(consumer, {self._tp(t): self.windows[t].next_offset for t in sorted(present)})
        self._asked, self._assigned, self._assigned_at = wanted, present, time.monotonic()

    async def _window(self, tenant: str, begin: int) -> SourceWindow:
        committed = await self._committed(topics.batch_requests(tenant), SOURCE_PARTITION)
        if committed is None:
            return SourceWindow(begin)
        if committed[0] < begin:
            log.error(
                "batch requests aged out before they were read",
                extra={"tenant": tenant, "committed": committed[0], "begin": begin},
            )
            return SourceWindow(begin)
        try:
            return SourceWindow(*committed)
        except ValueError as e:
            log.error("what was answered is not known", extra={"tenant": tenant, "error": str(e)})
            return SourceWindow(committed[0])


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` was set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
