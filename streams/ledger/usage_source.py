"""Ranges of inference.usage, by offset: from the topic, from the object store, from both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import obstore
from obstore.store import ObjectStore

from schemas.codec import CodecError
from streams.consumer import Consumer, assign_at
from streams.ledger.archive import PREFIX, ArchivedRecord, Part, decode_part, parse_part

TIMEOUT_S = 30.0
_POLL_MS = 1_000
_RECORDS_AT_ONCE = 5_000


class Gap(NamedTuple):
    """Offsets, both included, that are neither in the archive nor in the topic any more."""

    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"partition {self.partition}, offsets {self.first} to {self.last}"


class TopicReader:
    """Ranges of one topic. `partition` makes the consumer's TopicPartition. One range is read at a time."""

    def __init__(self, consumer: Consumer, partition: Callable[[str, int], Any], topic: str) -> None:
        self._consumer, self._partition, self._topic = consumer, partition, topic

    async def bounds(self, partition: int) -> tuple[int, int]:
        """The first offset that there is, and the next that will be. Raises TimeoutError, KafkaError."""
        tp = self._partition(self._topic, partition)
        async with asyncio.timeout(TIMEOUT_S):
            begin = (await self._consumer.beginning_offsets([tp]))[tp]
            return begin, (await self._consumer.end_offsets([tp]))[tp]

    async def end_before(self, partition: int, until_ms: int) -> int:
        """The offset behind the last record that the broker took before `until_ms`."""
        tp = self._partition(self._topic, partition)
        # The end first: where there is no later record, all before it are old enough.
        _, end = await self.bounds(partition)
        async with asyncio.timeout(TIMEOUT_S):
            found = (await self._consumer.offsets_for_times({tp: until_ms}))[tp]
        return end if found is None else min(end, int(found.offset))

    async def read(self, partition: int, first: int, end: int) -> AsyncIterator[list[ArchivedRecord]]:
        """`first` must be there still. Raises TimeoutError when nothing comes, KafkaError."""
        tp = self._partition(self._topic, partition)
        assign_at(self._consumer, {tp: first})
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                while not (found := await self._poll(tp)) and await self._consumer.position(tp) < end:
                    pass
                position = await self._consumer.position(tp)
            records = [
                ArchivedRecord(record.offset, record.timestamp, record.value or b"")
                for record in found
                if record.offset < end
            ]
            if records:
                yield records
            if position >= end:
                return

    async def _poll(self, tp: Any) -> list[Any]:
        polled = await self._consumer.getmany(tp, timeout_ms=_POLL_MS, max_records=_RECORDS_AT_ONCE)
        return polled.get(tp, [])


class UsageArchive:
    """The parts in the object store. Raises what that raises, and TimeoutError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def parts(self, partition: int) -> list[Part]:
        """In the order of their offsets."""
        found: list[Part] = []
        listing = obstore.list(self._store, f"{PREFIX}/{partition}")
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                metas = await anext(listing, None)
            if metas is None:
                return sorted(found, key=lambda part: (part.first, part.last))
            found += [part for meta in metas if (part := parse_part(meta["path"])) is not None]

    async def write(self, part: Part, data: bytes) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await obstore.put_async(self._store, part.name, data)

    async def read(self, part: Part) -> tuple[list[ArchivedRecord], list[str]]:
        """See `decode_part`."""
        async with asyncio.timeout(TIMEOUT_S):
            answer = await obstore.get_async(self._store, part.name)
            data = bytes(await answer.bytes_async())
        return await asyncio.to_thread(decode_part, part, data)


class UsageHistory:
    """All usage there ever was, each offset once: the archive, and the topic where that has nothing.

    `gaps` tells what was found in neither; `learn` takes the schemas that the archive's records need.
    """

    def __init__(self, archive: UsageArchive, topic: TopicReader, learn: Callable[[str], None]) -> None:
        self._archive, self._topic, self._learn = archive, topic, learn
        self.gaps: list[Gap] = []

    async def read(self, ends: Mapping[int, int]) -> AsyncIterator[tuple[int, list[ArchivedRecord]]]:
        """(partition, records) up to the end of each partition. Raises ArchiveError too."""
        for partition, end in sorted(ends.items()):
            offset = 0
            for part in await self._archive.parts(partition):
                if part.last < offset or part.first >= end:
                    continue
                async for records in self._from_topic(partition, offset, part.first):
                    yield partition, records
                records, schemas = await self._archive.read(part)
                for schema in schemas:
                    self._learn_one(schema)
                yield partition, [record for record in records if offset <= record.offset < end]
                offset = part.last + 1
            async for records in self._from_topic(partition, offset, end):
                yield partition, records

    async def _from_topic(self, partition: int, first: int, end: int) -> AsyncIterator[list[ArchivedRecord]]:
        if first >= end:
            return
        begin, _ = await self._topic.bounds(partition)
        if begin > first:
            self.gaps.append(Gap(partition, first, min(begin, end) - 1))
        if max(begin, first) < end:
            async for records in self._topic.read(partition, max(begin, first), end):
                yield records

    def _learn_one(self, schema: str) -> None:
        # One of a record that is no usage is of no use: its value is no bill.
        with suppress(CodecError):
            self._learn(schema)
