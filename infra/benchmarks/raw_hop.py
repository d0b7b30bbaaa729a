"""One record from a producer to a consumer and nothing else: what a hop costs on this machine, now."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.topics.create import create
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.topics import TopicSpec

_TOPIC = TopicSpec("bench.hop", 1, {"message.timestamp.type": "LogAppendTime"})
_TIMEOUT_S = 10.0


class RawHop:
    def __init__(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer) -> None:
        self._producer = producer
        self._consumer = consumer

    async def measure(self, size: int) -> float:
        """Milliseconds from the send of a record of `size` bytes until it is in the consumer's hands."""
        arrived = asyncio.create_task(self._consumer.getone())
        await asyncio.sleep(0.01)  # the fetch lies at the broker before the record comes, as in a service
        async with asyncio.timeout(_TIMEOUT_S):
            began = time.perf_counter()
            await self._producer.send(_TOPIC.name, bytes(size), partition=0)
            await arrived
            return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def raw_hop(kafka: str) -> AsyncIterator[RawHop]:
    await create(kafka, [_TOPIC], replication=1)
    partition = TopicPartition(_TOPIC.name, 0)
    producer = AIOKafkaProducer(**client_settings(kafka), **PRODUCER_SETTINGS)
    consumer = AIOKafkaConsumer(**client_settings(kafka), **CONSUMER_SETTINGS)
    try:
        await producer.start()
        await consumer.start()
        consumer.assign([partition])
        consumer.seek(partition, 0)
        yield RawHop(producer, consumer)
    finally:
        await producer.stop()
        await consumer.stop()
