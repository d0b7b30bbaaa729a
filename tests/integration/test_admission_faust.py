"""Faust gives admission what it fetched together, in order, and commits only what was decided about."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas import topics
from schemas.fleet import PRODUCER_SETTINGS
from schemas.topics import Layout
from streams import faust_app
from streams.admission.app import make_faust_app
from streams.admission.config import AdmissionConfig

LAYOUT = Layout(shards=2, worker_slots=1, gateway_slots=1)
CHUNK = faust_app._MAX_TOGETHER


async def committed(kafka: str, partition: int) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        tp = TopicPartition(topics.REQUESTS, partition)
        found = await admin.list_consumer_group_offsets("admission", partitions=[tp])
        offset: int = found[tp].offset
        return max(0, offset)
    finally:
        await admin.close()


async def append(kafka: str, partition: int, values: range) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS)
    await producer.start()
    for value in values:
        await producer.send(topics.REQUESTS, str(value).encode(), partition=partition)
    await producer.stop()


class Reader:
    """One life of a process: what it was given, by partition."""

    def __init__(self, kafka: str, datadir: Path) -> None:
        self.read: dict[int, list[int]] = defaultdict(list)
        self.order: list[int] = []
        self.hangs_at: tuple[int, int] | None = None
        self._config = AdmissionConfig(kafka=kafka, shards=2)
        self._datadir = datadir
        self._moved = asyncio.Event()

    async def run_until(self, done: Callable[[], bool]) -> None:
        async def on_record(message: Any) -> None:
            place = (message.partition, int(message.value))
            self.read[message.partition].append(int(message.value))
            self.order.append(message.partition)
            self._moved.set()
            if place == self.hangs_at:
                await asyncio.sleep(3600)

        async def on_assigned(_: set[int]) -> None: ...

        app = make_faust_app(self._config, self._datadir, on_record, on_assigned)
        app.finalize()
        await app.start()
        try:
            async with asyncio.timeout(40):
                while not done():
                    self._moved.clear()
                    await self._moved.wait()
            await asyncio.sleep(0.1)  # the agent asks for more: what it was given is acked
        finally:
            await app.stop()


async def test_a_life_that_ends_amid_records_commits_those_before_and_the_next_begins_there(
    kafka: str, tmp_path: Path
) -> None:
    count = 5 * CHUNK + 3
    await append(kafka, 0, range(count))
    first = Reader(kafka, tmp_path)
    first.hangs_at = (0, 2 * CHUNK + 1)
    await first.run_until(lambda: len(first.read[0]) == 2 * CHUNK + 2)
    assert first.read[0] == list(range(2 * CHUNK + 2))
    assert await committed(kafka, 0) == 2 * CHUNK

    second = Reader(kafka, tmp_path)
    await second.run_until(lambda: len(second.read[0]) == count - 2 * CHUNK)
    assert second.read[0] == list(range(2 * CHUNK, count))
    assert await committed(kafka, 0) == count

    # A lone record is given and committed as one of many is.
    await append(kafka, 0, range(count, count + 1))
    third = Reader(kafka, tmp_path)
    await third.run_until(lambda: bool(third.read[0]))
    assert third.read[0] == [count]
    assert await committed(kafka, 0) == count + 1


async def test_a_long_partition_does_not_hold_up_a_short_one(kafka: str, tmp_path: Path) -> None:
    await append(kafka, 2, range(100 * CHUNK))
    await append(kafka, 1, range(3))
    reader = Reader(kafka, tmp_path)
    await reader.run_until(lambda: len(reader.order) == 100 * CHUNK + 3)
    assert reader.read == {1: list(range(3)), 2: list(range(100 * CHUNK))}
    # By turns from the fetch that brought both, of which the broker gives the long one's part first.
    assert reader.order.index(1) < 90 * CHUNK
    assert (await committed(kafka, 1), await committed(kafka, 2)) == (3, 100 * CHUNK)


async def test_offsets_without_records_hold_up_no_commit(kafka: str, tmp_path: Path) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id="gaps")
    await producer.start()
    for begin in range(0, 30, 10):
        async with producer.transaction():
            for value in range(begin, begin + 10):
                await producer.send(topics.REQUESTS, str(value).encode(), partition=3)
    await producer.stop()
    reader = Reader(kafka, tmp_path)
    await reader.run_until(lambda: len(reader.read[3]) == 30)
    assert reader.read[3] == list(range(30))
    # Two ends of transactions lie below the last record, and one above.
    assert await committed(kafka, 3) == 32
