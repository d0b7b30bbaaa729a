"""Answers of batch requests onto the tenants' topics, each exactly once for read_committed readers."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import ProducerFenced

from schemas import topics
from schemas.codec import encode
from schemas.fleet import PRODUCER_SETTINGS
from schemas.headers import Headers, answer_headers
from schemas.kafka_login import client_settings
from schemas.records import BatchState
from schemas.stop_client import stop_client
from streams.ledger.batch_actions import Answer

log = logging.getLogger(__name__)

GROUP = "ledger-batch"
FLUSH_TIMEOUT_S = 30.0
# A dead letter is as large as a record may be, with the reason beside it.
_MAX_REQUEST_BYTES = 16 << 20
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A tenant's topics have one partition."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int = 0


class FencedError(RuntimeError):
    """Another process has the shard now."""


class ResultWriter:
    """The transactional producer of one coordinator shard. Its start fences whoever had the shard before."""

    def __init__(self, kafka: str, shard: int) -> None:
        self._id = f"headrace-batch-{shard}"
        self._producer = AIOKafkaProducer(
            **client_settings(kafka),
            client_id=f"ledger-results-{shard}",
            transactional_id=self._id,
            transaction_timeout_ms=int(FLUSH_TIMEOUT_S * 1000) * 2,
            **{k: v for k, v in PRODUCER_SETTINGS.items() if k != "enable_idempotence"}
            | {"max_request_size": _MAX_REQUEST_BYTES},
        )

    async def start(self) -> None:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            await self._producer.start()

    async def commit(
        self, records: Sequence[OutRecord], offsets: Mapping[tuple[str, int], tuple[int, str]]
    ) -> list[int]:
        """All of `records` and the group's `offsets` (to (offset, metadata) by topic and partition), or none.
        Returns where each record lies.

        What it raises leaves open whether they are there: only a new writer's start, and the offsets it
        then finds committed, tell. FencedError says that another has started.
        """
        producer: Any = self._producer
        # A failure aborts nothing here, which could hang: the next writer's start does.
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await producer.begin_transaction()
                sent = [
                    await producer.send(
                        r.topic, value=r.value, key=r.key, partition=r.partition, headers=r.headers
                    )
                    for r in records
                ]
                await producer.send_offsets_to_transaction(
                    {TopicPartition(*tp): value for tp, value in offsets.items()}, GROUP
                )
                places = [(await future).offset for future in sent]
                await producer.commit_transaction()
                return places
        except ProducerFenced as e:
            raise FencedError(f"another ledger has begun with {self._id}") from e

    async def stop(self) -> None:
        """Nothing that counts is left to it."""
        await stop_client(self._producer, _CLOSE_TIMEOUT_S)


def result_record(answer: Answer) -> OutRecord:
    source = answer.source
    key = None if source.custom_id is None else source.custom_id.encode(errors="replace")
    headers = answer_headers(answer.request_id, source.group)
    return OutRecord(topics.batch_results(source.tenant), key, answer.value, headers)


def state_record(state: BatchState, shard: int) -> OutRecord:
    return OutRecord(topics.BATCH_STATES, state.batch_id.encode(), encode(state), [], shard)
