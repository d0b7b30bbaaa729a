"""Faust commits only what the ledger has stored, also when it is stopped or fails in the middle."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas import topics
from schemas.fleet import PRODUCER_SETTINGS
from schemas.topics import Layout
from streams.ledger.app import make_faust_app
from streams.ledger.config import LedgerConfig

LAYOUT = Layout(shards=1, worker_slots=1, gateway_slots=1)


async def committed(kafka: str) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        tp = TopicPartition(topics.USAGE, 2)
        found = await admin.list_consumer_group_offsets("ledger", partitions=[tp])
        offset: int = found[tp].offset
        return max(0, offset)
    finally:
        await admin.close()


async def run_until(config: LedgerConfig, datadir: Path, on_batch: Any, done: asyncio.Event) -> None:
    async def on_assigned(_: set[int]) -> None: ...

    app = make_faust_app(config, datadir, on_batch, on_assigned)
    app.finalize()
    await app.start()
    try:
        async with asyncio.timeout(40):
            await done.wait()
    finally:
        await app.stop()


async def test_what_was_not_stored_comes_again(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "broker", rng=random.Random())
    await broker.start()
    try:
        kafka = broker.bootstrap_servers
        await create_topics(kafka, LAYOUT)
        config = LedgerConfig(kafka=kafka, shards=1, insert_rows=10, insert_window_ms=50)
        producer = AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS)
        await producer.start()
        for i in range(35):
            await producer.send_and_wait(topics.USAGE, str(i).encode(), partition=2)
        await producer.stop()

        stuck = asyncio.Event()
        first: list[bytes] = []

        async def store_one_then_hang(messages: Sequence[Any]) -> None:
            if first:
                stuck.set()
                await asyncio.sleep(3600)
            first.extend(message.value for message in messages)

        # Stopped while the second batch is not stored: only the first is committed.
        await run_until(config, tmp_path, store_one_then_hang, stuck)
        assert 0 < len(first) <= 10
        assert await committed(kafka) == len(first)

        stored: list[bytes] = []
        finished = asyncio.Event()

        async def store_all(messages: Sequence[Any]) -> None:
            stored.extend(message.value for message in messages)
            if len(first) + len(stored) == 35:
                finished.set()

        await run_until(config, tmp_path, store_all, finished)
        assert first + stored == [str(i).encode() for i in range(35)]
        assert await committed(kafka) == 35
        await broker.stop()
    finally:
        broker.kill()
