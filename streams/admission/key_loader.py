"""inference.idempotency, read when a partition is taken over: which keys earlier holders gave to whom."""

import asyncio
from collections.abc import Callable
from typing import Any

from schemas import topics
from schemas.records import KeyedRequest
from streams.admission.admission import Admission
from streams.admission.idempotency import KEEP_MS
from streams.consumer import Consumer, assign_at, decoded

_POLL_MS = 250


class KeyLoader:
    """`on_loaded(partition)` is called when all keys that a partition has are known.

    What is written later is this process's own word. The holder before may not have heard of the takeover and
    still let a request run: for that moment a key counts only with it.
    """

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        admission: Admission,
        on_loaded: Callable[[int], None],
        clock: Callable[[], int],
    ) -> None:
        self._consumer = consumer
        self._partition = partition
        self._admission = admission
        self._on_loaded = on_loaded
        self._clock = clock
        self._changed = asyncio.Event()

    def assignment_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            keys = self._admission.keys
            for number in self._admission.takeover.partitions():
                if not keys.is_loaded(number):
                    await self._load(number)

    async def _load(self, number: int) -> None:
        partition = self._partition(topics.IDEMPOTENCY, number)
        end = (await self._consumer.end_offsets([partition]))[partition]
        # 1. What is older than an answer can be read is of no use.
        found = await self._consumer.offsets_for_times({partition: self._clock() - KEEP_MS})
        place = found[partition]
        if place is not None and place.offset < end:
            assign_at(self._consumer, {partition: place.offset})
            while await self._consumer.position(partition) < end:
                batch = await self._consumer.getmany(partition, timeout_ms=_POLL_MS)
                records = (decoded(record, KeyedRequest) for record in batch.get(partition, ()))
                self._admission.keys.load(number, [record for record in records if record is not None])
        # 2. Unless it went meanwhile.
        if number in self._admission.takeover.partitions():
            self._admission.keys.loaded(number)
            self._on_loaded(number)
