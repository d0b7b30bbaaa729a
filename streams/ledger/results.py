"""Answers of batch requests onto the tenants' topics, each exactly once for read_committed readers."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import ProducerFenced

from schemas import topics
from schemas.fleet import PRODUCER_SETTINGS
from schemas.headers import Headers

log = logging.getLogger(__name__)

GROUP = "ledger-batch"
FLUSH_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record for partition 0 of a tenant's topic."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


class FencedError(RuntimeError):
    """Another process has the shard now."""


class ResultWriter:
    """The transactional producer of one coordinator shard. Its start fences whoever had the shard before."""

    def __init__(self, kafka: str, shard: int) -> None:
        self._id = f"headrace-batch-{shard}"
        self._producer = AIOKafkaProducer(
            bootstrap_servers=kafka,
            client_id=f"ledger-results-{shard}",
            transactional_id=self._id,
            transaction_timeout_ms=int(FLUSH_TIMEOUT_S * 1000) * 2,
            **{k: v for k, v in PRODUCER_SETTINGS.items() if k != "enable_idempotence"},
        )

    async def start(self) -> None:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            await self._producer.start()

    async def commit(
        self, records: Sequence[OutRecord], offsets: Mapping[tuple[str, int], tuple[int, str]]
    ) -> None:
        """All of `records` and the group's `offsets` (to (offset, metadata) by topic and partition), or none.

        What it raises leaves open whether they are there: only a new writer's start, and the offsets it
        then finds committed, tell. FencedError says that another has started.
        """
        producer: Any = self._producer
        # A failure aborts nothing here, which could hang: the next writer's start does.
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await producer.begin_transaction()
                sent = [
                    await producer.send(r.topic, value=r.value, key=r.key, partition=0, headers=r.headers)
                    for r in records
                ]
                await producer.send_offsets_to_transaction(
                    {TopicPartition(*tp): value for tp, value in offsets.items()}, GROUP
                )
                for future in sent:
                    await future
                await producer.commit_transaction()
        except ProducerFenced as e:
            raise FencedError(f"another ledger has begun with {self._id}") from e

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._producer.stop()
        except Exception as e:  # nothing that counts is left to it
            log.warning("results producer did not stop in order", extra={"error": repr(e)})


def result_record(tenant: str, custom_id: str | None, value: bytes) -> OutRecord:
    key = None if custom_id is None else custom_id.encode(errors="replace")
    return OutRecord(topics.batch_results(tenant), key, value, [])
