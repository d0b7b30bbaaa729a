"""What a benchmark left on the log, and when each request reached each topic, by broker time (1 ms)."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas import topics
from schemas.codec import decode
from schemas.fleet import CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.records import Dispatch, InferenceRequest, Tokens
from schemas.topics import Layout

_TIMEOUT_S = 60.0
_TOPICS = (topics.REQUESTS, topics.PREFILL, topics.TOKENS)


@dataclass(slots=True)
class Hops:
    """Broker times (ms of the epoch) of a request's first record on each topic."""

    requests: int | None = None
    prefill: int | None = None
    tokens: int | None = None


class LogReader:
    """Reads what a benchmark left on some topics, from where it began: those of a request's way."""

    def __init__(self, kafka: str, layout: Layout, names: Collection[str] = _TOPICS) -> None:
        self._kafka = kafka
        self._partitions = [
            TopicPartition(spec.name, number)
            for spec in topics.topic_specs(layout)
            if spec.name in names
            for number in range(spec.partitions)
        ]
        self._begin: dict[TopicPartition, int] = {}

    async def mark(self) -> None:
        """What is on the log now is not of interest."""
        consumer = await self._consumer()
        try:
            self._begin = await consumer.end_offsets(self._partitions)
        finally:
            await consumer.stop()

    async def hops(self) -> dict[str, Hops]:
        """By request id (hex), for all requests since `mark`. Raises TimeoutError."""
        found: dict[str, Hops] = {}
        for record, timestamp in await self.read():
            _note(found, record, timestamp)
        return found

    async def read(self) -> list[tuple[object, int]]:
        """All records since `mark` with their broker times, in order by partition. Raises TimeoutError."""
        found: list[tuple[object, int]] = []
        consumer = await self._consumer()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                end = await consumer.end_offsets(self._partitions)
                wanted = [p for p in self._partitions if end[p] > self._begin[p]]
                consumer.assign(wanted)
                for partition in wanted:
                    consumer.seek(partition, self._begin[partition])
                position = {p: self._begin[p] for p in wanted}
                while any(position[p] < end[p] for p in wanted):
                    for partition, records in (await consumer.getmany(timeout_ms=500)).items():
                        found += [(decode(record.value), record.timestamp) for record in records]
                        position[partition] = records[-1].offset + 1
        finally:
            await consumer.stop()
        return found

    async def _consumer(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(**client_settings(self._kafka), **CONSUMER_SETTINGS)
        await consumer.start()
        return consumer


def _note(found: dict[str, Hops], record: object, timestamp: int) -> None:
    match record:
        case InferenceRequest():
            hops = found.setdefault(record.request_id.hex(), Hops())
            hops.requests = hops.requests or timestamp
        case Dispatch():
            hops = found.setdefault(record.request.request_id.hex(), Hops())
            hops.prefill = hops.prefill or timestamp
        case Tokens():
            for chunk in record.chunks:
                if chunk.token_ids:
                    hops = found.setdefault(chunk.request_id.hex(), Hops())
                    hops.tokens = hops.tokens or timestamp
