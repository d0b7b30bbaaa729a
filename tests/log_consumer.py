"""A consumer over lists in memory, which like aiokafka takes no partition without a place."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Partition(NamedTuple):
    topic: str
    partition: int


@dataclass
class LogRecord:
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int = 0
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class LogConsumer:
    """`logs` may grow while it is read. Every wait lets its fetcher look at what is assigned."""

    logs: dict[Partition, list[LogRecord]] = field(default_factory=dict)
    places: dict[Partition, int | None] = field(default_factory=dict)

    def append(self, topic: str, value: bytes | None, key: bytes | None = None) -> None:
        partition = Partition(topic, 0)
        log = self.logs.setdefault(partition, [])
        log.append(LogRecord(topic, 0, len(log), key, value))

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def assign(self, partitions: list[Any]) -> None:
        self.places = dict.fromkeys(partitions)

    def seek(self, partition: Any, offset: int) -> None:
        assert partition in self.places
        self.places[partition] = offset

    async def position(self, partition: Any) -> int:
        await self._fetch()
        place = self.places[partition]
        assert place is not None
        return place

    async def getmany(
        self, *partitions: Any, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[Any, list[Any]]:
        await self._fetch()
        batch: dict[Any, list[Any]] = {}
        for partition in partitions or tuple(self.places):
            place = self.places[partition]
            if records := self.logs.get(partition, [])[place:][:max_records]:
                batch[partition] = records
                self.places[partition] = records[-1].offset + 1
        return batch

    async def beginning_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]:
        await self._fetch()
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]:
        await self._fetch()
        return {partition: len(self.logs.get(partition, [])) for partition in partitions}

    async def offsets_for_times(self, timestamps: dict[Any, int]) -> dict[Any, Any]:
        await self._fetch()
        return dict.fromkeys(timestamps)

    async def topics(self) -> set[str]:
        await self._fetch()
        return {partition.topic for partition in self.logs}

    async def _fetch(self) -> None:
        await asyncio.sleep(0)
        assert None not in self.places.values(), "a partition is assigned and has no place"
