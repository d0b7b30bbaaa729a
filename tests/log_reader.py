"""Reads what a service says on its topics, record by record, and has a producer to talk to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.codec import CodecError, decode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.headers import Headers
from schemas.topics import Layout
from tests.service_process import DEADLINE_S


@dataclass
class Seen:
    """A record as it lies in the log. `value` is None where it cannot be decoded."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    value: Any
    raw: bytes
    headers: Headers


@dataclass
class LogReader:
    """All that was written since it was opened, in the order of each partition."""

    producer: AIOKafkaProducer
    consumer: AIOKafkaConsumer
    seen: list[Seen] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def open(cls, bootstrap: str, layout: Layout, names: Iterable[str]) -> AsyncIterator[Self]:
        """Reads these topics from their ends on."""
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **PRODUCER_SETTINGS)
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **CONSUMER_SETTINGS)
        await producer.start()
        await consumer.start()
        try:
            counts = {spec.name: spec.partitions for spec in topics.topic_specs(layout)}
            places = await consumer.end_offsets(
                [TopicPartition(name, p) for name in names for p in range(counts[name])]
            )
            # With nothing awaited in between: a partition without a place is an error to the consumer.
            consumer.assign(list(places))
            for partition, end in places.items():
                consumer.seek(partition, end)
            yield cls(producer, consumer)
        finally:
            await consumer.stop()
            await producer.stop()

    async def wait_for(self, condition: Callable[[], Any], timeout: float = DEADLINE_S) -> Any:
        """Reads on until the condition gives something, and returns that."""
        async with asyncio.timeout(timeout):
            while not (result := condition()):
                await self._read()
            return result

    async def read_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await self._read()

    async def _read(self) -> None:
        for records in (await self.consumer.getmany(timeout_ms=20)).values():
            for r in records:
                try:
                    value = decode(r.value)
                except CodecError:
                    value = None
                self.seen.append(
                    Seen(r.topic, r.partition, r.offset, r.timestamp, value, r.value, list(r.headers))
                )
