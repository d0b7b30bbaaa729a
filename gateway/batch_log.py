"""batch.jobs and batch.states: read from their beginning on when they are first asked for, and written to."""

import asyncio
import logging
import time
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from gateway.batch_book import Batch, BatchBook
from schemas import topics
from schemas.clock import epoch_ms
from schemas.codec import CodecError, decode, encode
from schemas.fleet import BUSY_CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.records import BatchCancel, BatchJob, BatchState
from schemas.stop_client import stop_client

log = logging.getLogger(__name__)

# For all that was ever written; and for what was written since.
START_S = 20.0
CATCH_UP_S = 5.0
_STOP_S = 5.0
_POLL_MS = 500
_FORGET_S = 3_600.0
_CANCEL_KEY = "/cancel"


class BatchLog:
    """Every method raises TimeoutError and KafkaError when Kafka does not answer. `producer` is started."""

    def __init__(self, bootstrap_servers: str, shards: int, producer: AIOKafkaProducer) -> None:
        self.book = BatchBook()
        self._producer, self._shards = producer, shards
        self._partitions = [
            TopicPartition(topic, shard)
            for topic in (topics.BATCH_JOBS, topics.BATCH_STATES)
            for shard in range(shards)
        ]
        # States are written in transactions; some are aborted.
        self._consumer = AIOKafkaConsumer(
            **client_settings(bootstrap_servers), **BUSY_CONSUMER_SETTINGS, isolation_level="read_committed"
        )
        self._moved = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when all that there is was read."""
        async with asyncio.timeout(START_S):
            await self._consumer.start()
            self._consumer.assign(self._partitions)
            for partition, offset in (await self._consumer.beginning_offsets(self._partitions)).items():
                self._consumer.seek(partition, offset)
            self._following = asyncio.create_task(self._follow(), name="batches")
            await self._to_end(self._partitions)

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await stop_client(self._consumer, _STOP_S)

    @property
    def failed(self) -> bool:
        """It reads no more: make another."""
        return self._following is None or self._following.done()

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        """One that is not known may be new, made at another gateway: the log is read to its end first."""
        batch = self.book.get(tenant, batch_id)
        if batch is None:
            await self.catch_up(tenant)
            batch = self.book.get(tenant, batch_id)
        return batch

    async def catch_up(self, tenant: str) -> None:
        """Returns when all that was written of the tenant's batches before this call is read."""
        shard = topics.tenant_shard(tenant, self._shards)
        async with asyncio.timeout(CATCH_UP_S):
            await self._to_end([p for p in self._partitions if p.partition == shard])

    async def create(self, job: BatchJob) -> None:
        """Returns when the broker has it: from here on it is run."""
        await self._append(job.tenant, job.batch_id, encode(job))
        self.book.on_job(job)

    async def cancel(self, cancel: BatchCancel) -> None:
        """Returns when the broker has it."""
        await self._append(cancel.tenant, cancel.batch_id + _CANCEL_KEY, encode(cancel))
        self.book.on_job(cancel)

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Nobody finds it again. For one that has ended."""
        for key in (batch_id + _CANCEL_KEY, batch_id):
            await self._append(tenant, key, None)
        self.book.on_deleted(batch_id)

    async def _append(self, tenant: str, key: str, value: bytes | None) -> None:
        shard = topics.tenant_shard(tenant, self._shards)
        async with asyncio.timeout(CATCH_UP_S):
            await self._producer.send_and_wait(topics.BATCH_JOBS, value, key=key.encode(), partition=shard)

    async def _to_end(self, partitions: list[TopicPartition]) -> None:
        for partition, end in (await self._consumer.end_offsets(partitions)).items():
            while await self._consumer.position(partition) < end:
                if self._following is not None and self._following.done():
                    raise KafkaError("the batch topics are read no more")
                self._moved.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), _POLL_MS / 1000)

    async def _follow(self) -> None:
        forget_at = time.monotonic() + _FORGET_S
        while True:
            for messages in (await self._consumer.getmany(timeout_ms=_POLL_MS)).values():
                for message in messages:
                    self._take(message)
            self._moved.set()
            if time.monotonic() >= forget_at:
                self.book.forget(epoch_ms())
                forget_at = time.monotonic() + _FORGET_S

    def _take(self, message: ConsumerRecord) -> None:
        key = (message.key or b"").decode(errors="replace")
        if message.value is None:
            if not key.endswith(_CANCEL_KEY):
                self.book.on_deleted(key)
            return
        try:
            record = decode(message.value)
        except CodecError as e:
            log.error("a batch cannot be read", extra={"offset": message.offset, "error": str(e)})
            return
        if isinstance(record, BatchState):
            self.book.on_state(record)
        elif isinstance(record, BatchJob | BatchCancel):
            self.book.on_job(record)
