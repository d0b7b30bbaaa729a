"""Takes the usage of past days into the object store, long before it ages out of the topic."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from schemas.clock import epoch_ms
from schemas.codec import default_codec
from schemas.topics import DAY_MS, USAGE_RETENTION_MS
from streams.ledger.archive import (
    RECORDS_A_PART,
    ArchivedRecord,
    Cutter,
    day_begin,
    encode_part,
    next_offset,
    part_of,
)
from streams.ledger.metrics import ARCHIVE_LAG, ARCHIVED
from streams.ledger.usage_source import Gap, TopicReader, UsageArchive

log = logging.getLogger(__name__)

# A day is what it should be at most; from here on there are three weeks left to mend it.
LATE_MS = 7 * DAY_MS
_LOOK_S = 1.0
_AGAIN_S = 60.0


class Archiver:
    """What is archived already is what lies in the store, and nothing else is remembered. Two that archive
    the same partition write the same objects."""

    def __init__(
        self,
        archive: UsageArchive,
        topic: TopicReader,
        catch_up: Callable[[], Awaitable[None]],
        records_a_part: int = RECORDS_A_PART,
    ) -> None:
        """`catch_up` reads control.schemas to its end."""
        self._archive, self._topic, self._catch_up = archive, topic, catch_up
        self._records_a_part = records_a_part

    async def archive(self, partition: int, until_ms: int) -> int | None:
        """Archives what the broker took before `until_ms`, a midnight (UTC). Returns when the oldest record
        that is not archived was taken (ms), None where there is none. Raises what the broker and the store
        raise.

        1. The place: behind the last part. 2. Whole parts in order, each put as one. If the process dies
        between two, the next look goes on there.
        """
        offset = next_offset(await self._archive.parts(partition))
        end = await self._topic.end_before(partition, until_ms)
        begin, last = await self._topic.bounds(partition)
        if begin > offset:
            lost = Gap(partition, offset, begin - 1)
            log.error("usage aged out of the topic before it was archived", extra={"lost": str(lost)})
            offset = begin
        if offset < end:
            cutter = Cutter(self._records_a_part)
            async for records in self._topic.read(partition, offset, end):
                for part in cutter.add(records):
                    await self._put(partition, part)
            await self._put(partition, cutter.rest())
        return await self._oldest(partition, max(offset, end), last)

    async def _put(self, partition: int, records: list[ArchivedRecord]) -> None:
        if not records:
            return
        codec = default_codec()
        if any(codec.schema_of(record.value) is None for record in records):
            # Writers publish a schema before they use it: what is not known now is no record of ours.
            await self._catch_up()
        part = part_of(partition, records)
        data = await asyncio.to_thread(encode_part, part, records, codec.schema_of)
        await self._archive.write(part, data)
        ARCHIVED.inc(len(records))
        log.info("usage archived", extra={"object": part.name, "records": len(records)})

    async def _oldest(self, partition: int, offset: int, end: int) -> int | None:
        if offset >= end:
            return None
        async for records in self._topic.read(partition, offset, offset + 1):
            return records[0].appended_at
        return None


async def keep_archived(
    archiver: Archiver,
    partitions: Callable[[], Collection[int]],
    every_s: float,
    clock: Callable[[], int] = epoch_ms,
    look_s: float = _LOOK_S,
) -> None:
    """Archives the partitions that are this process's, now and then and when they change."""
    oldest: dict[int, int | None] = {}
    looked_at: set[int] = set()
    due = time.monotonic()
    while True:
        ours = set(partitions())
        if ours != looked_at or time.monotonic() >= due:
            due = time.monotonic() + every_s
            for partition in sorted(ours):
                try:
                    oldest[partition] = await archiver.archive(partition, day_begin(clock()))
                except Exception as e:
                    # Its first line: what follows may be the store's whole answer.
                    log.error(
                        "usage could not be archived", extra={"partition": partition, "error": f"{e!r:.300}"}
                    )
                    due = min(due, time.monotonic() + _AGAIN_S)
                _tell_lag(partition, oldest.get(partition), clock())
            for partition in looked_at - ours:
                oldest.pop(partition, None)
                ARCHIVE_LAG.labels(str(partition)).set(0)
            looked_at = ours
        await asyncio.sleep(look_s)


def _tell_lag(partition: int, oldest: int | None, now_ms: int) -> None:
    lag_ms = 0 if oldest is None else max(0, now_ms - oldest)
    ARCHIVE_LAG.labels(str(partition)).set(lag_ms / 1000)
    if lag_ms > LATE_MS:
        left = (USAGE_RETENTION_MS - lag_ms) / DAY_MS
        log.error(
            "usage waits to be archived: it ages out of the topic",
            extra={"partition": partition, "days_left": round(left, 1)},
        )
