"""Requests read back from inference.requests, by where they lie."""

import asyncio
from collections.abc import Awaitable, Callable

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from schemas import topics
from schemas.fleet import CONSUMER_SETTINGS
from schemas.headers import traceparent
from schemas.kafka_login import client_settings
from schemas.records import InferenceRequest
from schemas.stop_client import stop_client

_LOOK_S = 5.0
_STOP_S = 5.0


class RequestLookup:
    """One at a time, by a consumer that is there once it is needed."""

    def __init__(self, bootstrap_servers: str, decode: Callable[[ConsumerRecord], Awaitable[object]]) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._decode = decode
        self._consumer: AIOKafkaConsumer | None = None

    async def find(
        self, request_id: bytes, partition: int, offset: int
    ) -> tuple[InferenceRequest, str | None] | None:
        """The record at that place, with its traceparent; None if it is no longer there, or is another's.

        Raises TimeoutError (after 5 s), KafkaError.
        """
        async with asyncio.timeout(_LOOK_S):
            consumer = await self._started()
            place = TopicPartition(topics.REQUESTS, partition)
            consumer.assign([place])
            consumer.seek(place, offset)
            try:
                message = await consumer.getone(place)
            except OffsetOutOfRangeError:
                return None
            finally:
                consumer.unsubscribe()
        record = await self._decode(message) if message.offset == offset else None
        if not isinstance(record, InferenceRequest) or record.request_id != request_id:
            return None
        return record, traceparent(message.headers)

    async def stop(self) -> None:
        if self._consumer is not None:
            await stop_client(self._consumer, _STOP_S)

    async def _started(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            consumer = AIOKafkaConsumer(**client_settings(self._bootstrap_servers), **CONSUMER_SETTINGS)
            await consumer.start()
            self._consumer = consumer
        return self._consumer
