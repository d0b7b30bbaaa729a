"""All usage of a deployment, for its administrators: the archive, the topic, and how far the ledger is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas import topics
from schemas.codec import CodecError, default_codec
from schemas.fleet import BUSY_CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.object_store import open_store
from streams.ledger.billing import UsageRow
from streams.ledger.config import ROLE
from streams.ledger.recomputation import rows_of
from streams.ledger.usage_source import TopicReader, UsageArchive, UsageHistory

_ASK_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 30.0
# A ledger commits what it has stored a second later.
_COMMIT_WAIT_S = 10.0


class UsageLog:
    def __init__(self, consumer: Any, admin: Any, object_store: str) -> None:
        """Raises ValueError for a bad `object_store`."""
        self._consumer, self._admin = consumer, admin
        self.topic = TopicReader(consumer, TopicPartition, topics.USAGE)
        archive = UsageArchive(open_store(object_store))
        self.history = UsageHistory(archive, self.topic, default_codec().learn)

    async def partitions(self) -> list[int]:
        """As the broker has them: a layout that is not the deployment's would leave some out."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            (found,) = await self._admin.describe_topics([topics.USAGE])
        if not found["partitions"]:
            raise ValueError(f"there is no topic {topics.USAGE}: is this the broker of a deployment?")
        return sorted(each["partition"] for each in found["partitions"])

    async def committed(self) -> dict[int, int]:
        """Where the ledger is, by partition: all before is in its table. Where it has committed nothing, and
        that does not change in a while, the topic's end: it should have."""
        places = {number: await self.topic.bounds(number) for number in await self.partitions()}
        known: dict[int, int] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(_COMMIT_WAIT_S):
                while True:
                    known = await self._committed(list(places))
                    if all(number in known or end == 0 for number, (_, end) in places.items()):
                        break
                    await asyncio.sleep(0.5)
        return {number: known.get(number, end) for number, (_, end) in places.items()}

    async def _committed(self, partitions: list[int]) -> dict[int, int]:
        asked = [TopicPartition(topics.USAGE, number) for number in partitions]
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            found = await self._admin.list_consumer_group_offsets(ROLE, partitions=asked)
        return {tp.partition: value.offset for tp, value in found.items() if value.offset >= 0}

    async def since(self, begins: dict[int, int]) -> list[UsageRow]:
        """The rows of what came to the topic behind these offsets."""
        rows: list[UsageRow] = []
        for partition, offset in sorted(begins.items()):
            begin, end = await self.topic.bounds(partition)
            if max(begin, offset) < end:
                async for records in self.topic.read(partition, max(begin, offset), end):
                    rows += rows_of(records)
        return rows

    async def learn_schemas(self) -> None:
        """All that writers have published: usage may be older or newer than this program."""
        reader = TopicReader(self._consumer, TopicPartition, topics.SCHEMAS)
        begin, end = await reader.bounds(0)
        if begin < end:
            async for records in reader.read(0, begin, end):
                for record in records:
                    with suppress(CodecError):
                        default_codec().learn(record.value.decode(errors="replace"))


@asynccontextmanager
async def open_usage_log(servers: str, object_store: str) -> AsyncIterator[UsageLog]:
    """Raises ValueError, TimeoutError, KafkaError."""
    consumer = AIOKafkaConsumer(**client_settings(servers), **BUSY_CONSUMER_SETTINGS)
    admin = AIOKafkaAdminClient(**client_settings(servers))
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await consumer.start()
            await admin.start()
        log = UsageLog(consumer, admin, object_store)
        await log.learn_schemas()
        yield log
    finally:
        await admin.close()
        await consumer.stop()
