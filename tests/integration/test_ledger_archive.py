"""Usage in the object store: on a real broker, over a folder and over S3."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from obstore.store import ObjectStore

from schemas import topics
from schemas.codec import decode, default_codec, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.object_store import open_store
from schemas.records import Usage
from schemas.topics import DAY_MS, Layout
from streams.ledger.archive import ArchivedRecord
from streams.ledger.archiver import Archiver, keep_archived
from streams.ledger.metrics import REGISTRY
from streams.ledger.usage_source import Gap, TopicReader, UsageArchive, UsageHistory
from tests.s3_server import s3_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=4)


@dataclass
class Log:
    producer: Any
    admin: Any
    topic: TopicReader
    sent: dict[int, list[bytes]]

    async def send(self, partition: int, count: int) -> None:
        """Each record is another one."""
        for _ in range(count):
            n = sum(map(len, self.sent.values()))
            usage = Usage(n.to_bytes(16, "big"), 1, False, "demo", 2, "m", 10, 0, n, "stop", 1 + n, 2 + n)
            await self.producer.send_and_wait(topics.USAGE, encode(usage), partition=partition)
            self.sent.setdefault(partition, []).append(encode(usage))

    async def age_out(self, partition: int, first: int) -> None:
        """The broker forgets what lies before `first`."""
        tp = TopicPartition(topics.USAGE, partition)
        await self.admin.delete_records({tp: RecordsToDelete(before_offset=first)})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def log(kafka: str) -> AsyncIterator[Log]:
    producer = AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, **CONSUMER_SETTINGS)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    for client in (producer, consumer, admin):
        await client.start()
    yield Log(producer, admin, TopicReader(consumer, TopicPartition, topics.USAGE), {})
    await admin.close()
    await consumer.stop()
    await producer.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield open_store(str(tmp_path))
    else:
        with s3_server() as s3:
            yield open_store(s3.url)


async def nothing_new() -> None: ...


def objects(store: ObjectStore) -> dict[str, bytes]:
    return {
        meta["path"]: bytes(obstore.get(store, meta["path"]).bytes())
        for metas in obstore.list(store)
        for meta in metas
    }


def midnight() -> int:
    """The next one: what is in the topic now is of a day that is over by then."""
    now = time.time_ns() // 1_000_000
    return now - now % DAY_MS + DAY_MS


async def history(
    log: Log, store: ObjectStore, ends: dict[int, int]
) -> tuple[dict[int, list[ArchivedRecord]], list[Gap]]:
    reader = UsageHistory(UsageArchive(store), log.topic, default_codec().learn)
    found: dict[int, list[ArchivedRecord]] = {}
    async for partition, records in reader.read(ends):
        found.setdefault(partition, []).extend(records)
    return found, reader.gaps


@pytest.mark.parametrize("store", ["folder"], indirect=True)
async def test_what_was_archived_and_has_aged_out_is_read_with_what_is_in_the_topic(
    log: Log, store: ObjectStore
) -> None:
    """In the archive alone, in both, in the topic alone: each offset once, in order."""
    archiver = Archiver(UsageArchive(store), log.topic, nothing_new, records_a_part=4)
    await log.send(0, 10)
    assert await archiver.archive(0, midnight()) is None
    assert [name.rpartition("/")[2] for name in sorted(objects(store))] == [
        f"{first:020d}-{last:020d}.avro" for first, last in ((0, 3), (4, 7), (8, 9))
    ]
    await log.send(0, 3)
    await log.age_out(0, 6)
    _, end = await log.topic.bounds(0)
    found, gaps = await history(log, store, {0: end, 3: 0})
    assert [record.offset for record in found[0]] == list(range(13))
    assert [record.value for record in found[0]] == log.sent[0]
    assert gaps == []
    # Up to anywhere.
    found, _ = await history(log, store, {0: 5})
    assert [record.offset for record in found[0]] == list(range(5))
    # An object is lost: what the topic has of it is read there, and the rest is named.
    obstore.delete(store, f"usage/0/{4:020d}-{7:020d}.avro")
    found, gaps = await history(log, store, {0: end})
    assert [record.offset for record in found[0]] == [0, 1, 2, 3, *range(6, 13)]
    assert gaps == [Gap(0, 4, 5)]


async def test_done_again_it_writes_the_same_bytes_and_goes_on_where_it_was_broken_off(
    log: Log, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    archiver = Archiver(UsageArchive(store), log.topic, nothing_new, records_a_part=5)
    begin, before = await log.topic.bounds(1)
    await log.send(1, 12)
    await archiver.archive(1, midnight())
    whole = objects(store)
    assert len(whole) == -(-(before - begin + 12) // 5)
    # Nothing is done twice, and what is gone is written as it was.
    await archiver.archive(1, midnight())
    assert objects(store) == whole
    for name in sorted(whole)[1:]:
        obstore.delete(store, name)
    await Archiver(UsageArchive(store), log.topic, nothing_new, records_a_part=5).archive(1, midnight())
    assert objects(store) == whole
    assert "aged out" not in caplog.text
    found, gaps = await history(log, store, {1: before + 12})
    assert [record.value for record in found[1]] == log.sent[1]
    assert gaps == []
    assert all(decode(record.value).tenant == "demo" for record in found[1])


@pytest.mark.parametrize("store", ["folder"], indirect=True)
async def test_today_is_left_and_its_age_is_told(log: Log, store: ObjectStore) -> None:
    archiver = Archiver(UsageArchive(store), log.topic, nothing_new)
    await log.send(2, 3)
    today = midnight() - DAY_MS
    oldest = await archiver.archive(2, today)
    assert oldest is not None
    assert today <= oldest <= time.time_ns() // 1_000_000
    assert objects(store) == {}


@pytest.mark.parametrize("store", ["folder"], indirect=True)
async def test_what_aged_out_before_it_was_archived_is_told_of(
    log: Log, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    await log.send(4, 6)
    await log.age_out(4, 4)
    with caplog.at_level(logging.ERROR):
        await Archiver(UsageArchive(store), log.topic, nothing_new).archive(4, midnight())
    assert [getattr(record, "lost", None) for record in caplog.records] == ["partition 4, offsets 0 to 3"]
    found, gaps = await history(log, store, {4: 6})
    assert [record.offset for record in found[4]] == [4, 5]
    assert gaps == [Gap(4, 0, 3)]


class AwayStore(UsageArchive):
    """A store that answers no write until `back`."""

    back = False

    async def write(self, part: Any, data: bytes) -> None:
        if not self.back:
            raise OSError("away")
        await super().write(part, data)


@pytest.mark.parametrize("store", ["folder"], indirect=True)
async def test_the_lag_is_measured_and_told_of_while_the_store_is_away(
    log: Log, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    await log.send(5, 3)
    archive, now = AwayStore(store), midnight() - 1
    ours: set[int] = set()
    archiver = Archiver(archive, log.topic, nothing_new)

    def lag() -> float | None:
        return REGISTRY.get_sample_value("headrace_ledger_archive_lag_seconds", {"partition": "5"})

    async def until(condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    keeping = asyncio.create_task(keep_archived(archiver, lambda: ours, 0.05, lambda: now, look_s=0.02))
    ours.add(5)
    # Of today: nothing to do yet.
    await until(lambda: (lag() or 0) > 0)
    assert "could not" not in caplog.text
    now += 8 * DAY_MS
    await until(lambda: "could not be archived" in caplog.text)
    assert (lag() or 0) > 7 * 86_400
    late = next(record for record in caplog.records if "ages out of the topic" in record.message)
    assert 21 <= getattr(late, "days_left", 0) <= 22  # by the time of day
    archive.back = True
    await until(lambda: lag() == 0)
    assert len(objects(store)) == 1
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
