"""What a gateway reads of the log beside its streams, each from when it is first asked for."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from aiokafka import AIOKafkaProducer

from gateway.batch_log import BatchLog
from gateway.config import GatewayConfig
from gateway.control_store import ModelStore, SpendStore, TenantStore
from schemas.stored_files import StoredFile


class _Store(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=_Store)
_START_S = 30.0


class _Kept(Generic[S]):
    """One store, begun when it is first asked for, for all that ask meanwhile; begun anew when it failed."""

    def __init__(self, make: Callable[[], S], failed: Callable[[S], bool] = lambda store: False) -> None:
        self._make, self._failed = make, failed
        self._store: S | None = None
        self._starting: asyncio.Task[S] | None = None

    async def get(self) -> S:
        if self._store is not None and not self._failed(self._store):
            return self._store
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        async with asyncio.timeout(_START_S):
            return await asyncio.shield(self._starting)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        store, self._store = self._store, None
        if store is not None:
            await store.stop()

    async def _start(self) -> S:
        failed, self._store = self._store, None
        if failed is not None:
            await failed.stop()
        store = self._make()
        try:
            await store.start()
        except BaseException:
            await store.stop()
            raise
        self._store = store
        return store


class Stores:
    """`producer()` is started. All methods raise TimeoutError and KafkaError when Kafka does not answer."""

    def __init__(self, config: GatewayConfig, producer: Callable[[], AIOKafkaProducer]) -> None:
        kafka, layout = config.kafka, config.tenant_layout
        self._tenants = _Kept(lambda: TenantStore(kafka, layout()))
        self._models = _Kept(lambda: ModelStore(kafka))
        self._spend = _Kept(lambda: SpendStore(kafka))
        self._batches = _Kept(lambda: BatchLog(kafka, config.shards, producer()), lambda log: log.failed)

    async def tenants(self) -> TenantStore:
        return await self._tenants.get()

    async def models(self) -> ModelStore:
        return await self._models.get()

    async def spend(self) -> SpendStore:
        return await self._spend.get()

    async def batches(self) -> BatchLog:
        return await self._batches.get()

    async def result_file(self, tenant: str, file_id: str) -> StoredFile | None:
        """The output or error file of a batch that has not ended, as far as it is written."""
        log = await self.batches()
        file = log.book.result_file(tenant, file_id)
        if file is None:
            await log.catch_up(tenant)
            file = log.book.result_file(tenant, file_id)
        return file

    async def batch_using(self, tenant: str, file_id: str) -> str | None:
        """The id of a batch that has not ended and reads the file, or writes it."""
        log = await self.batches()
        await log.catch_up(tenant)
        return log.book.user_of(tenant, file_id)

    async def close(self) -> None:
        for kept in (self._tenants, self._models, self._spend, self._batches):
            await kept.close()
