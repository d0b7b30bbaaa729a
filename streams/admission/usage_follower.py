"""inference.usage, read by hand beside Faust: it settles reservations and tells how long answers are."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from schemas import topics
from schemas.records import Usage
from streams.admission.actions import Action
from streams.admission.admission import Admission
from streams.consumer import Consumer, assign_at, decoded

# Usage rows so old at takeover still tell how full a bucket of one minute is.
USAGE_WINDOW_MS = 60_000
_POLL_MS = 250


class UsageFollower:
    """Reads the same partitions that are held of inference.requests."""

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
        self._assigned: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}
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
            await self._tell_what_is_read()
            for place, records in (await self._consumer.getmany(timeout_ms=_POLL_MS)).items():
                for record in records:
                    usage = decoded(record, Usage)
                    if usage is not None:
                        self._put(self._admission.on_usage(usage, self._clock(), place.partition))

    async def _tell_what_is_read(self) -> None:
        """Where all is read that was there at the takeover."""
        for place, end in list(self._ends.items()):
            if await self._consumer.position(place) >= end:
                del self._ends[place]
                self._admission.restating.usage_is_read(place.partition)

    async def _assign(self) -> None:
        held = self._admission.takeover.held()
        wanted = {self._partition(topics.USAGE, p): takeover for p, takeover in held}
        # Of a partition that went and came back another process settled meanwhile: it is begun anew.
        kept = {p for p, takeover in wanted.items() if self._assigned.get(p) == takeover}
        offsets = {p: await self._consumer.position(p) for p in kept}
        fresh = wanted.keys() - kept
        self._ends = {p: end for p, end in self._ends.items() if p in kept}
        if fresh:
            # 1. Where there is nothing so young, begin at the end.
            ends = await self._consumer.end_offsets(fresh)
            self._ends |= ends
            offsets |= ends
            # 2. What the tenants used in the last minute fills the buckets of a process that has just come.
            since = self._clock() - USAGE_WINDOW_MS
            found = await self._consumer.offsets_for_times(dict.fromkeys(fresh, since))
            offsets |= {p: place.offset for p, place in found.items() if place is not None}
        assign_at(self._consumer, offsets)
        self._assigned = wanted
