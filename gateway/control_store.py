"""control.tenants, .models and .prices for administrators: read to the end, changed only as they were read.

Two who change the same record at a time do not overwrite one another: see schemas/control_log.py.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.broker_access import BrokerAccess
from gateway.topic_admin import create_tenant_topics
from schemas import topics
from schemas.budgets import Standing, Told, spend_key
from schemas.codec import CodecError, decode, default_codec, encode
from schemas.control_log import NOTHING, ControlLog, replaces_header
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS, publish_schemas
from schemas.kafka_login import KafkaLogin, client_settings
from schemas.lasting_producer import lasting
from schemas.records import Model, Price, Spend, Tenant
from schemas.stop_client import stop_client
from schemas.topic_check import check_topics
from schemas.topics import Layout

TIMEOUT_S = 30.0
_POLL_MS = 500
_STOP_S = 5.0
_MAX_TRIES = 5
_SETTINGS = {**CONSUMER_SETTINGS, "auto_offset_reset": "earliest", "fetch_max_wait_ms": 50}

R = TypeVar("R", Tenant, Model, Price, Spend)


class VersionConflictError(Exception):
    """The record is not as it was when the change was thought of. `version`: the one in force."""

    def __init__(self, kind: str, name: str, version: int) -> None:
        self.version = version
        super().__init__(f"{kind} {name} was changed meanwhile: its version is {version}")


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """`version` is its offset; `at` the broker's time (ms) of what is in force."""

    record: R
    version: int
    at: int


@dataclass(frozen=True, slots=True)
class _Raw:
    value: bytes
    offset: int
    at: int


class ControlStore(Generic[R]):
    """The records of one kind. Every method raises TimeoutError and KafkaError when Kafka does not answer;
    `start` first, which also raises MissingTopicsError.
    """

    def __init__(self, bootstrap_servers: str, topic: str, kind: type[R]) -> None:
        self._partition = TopicPartition(topic, 0)
        self._kind: type[R] = kind
        self._lock = asyncio.Lock()
        self._log = ControlLog()
        self._raw: dict[str, _Raw] = {}
        self._lost: set[int] = set()
        self._consumer = AIOKafkaConsumer(**client_settings(bootstrap_servers), **_SETTINGS)
        self._producer = lasting(AIOKafkaProducer(**client_settings(bootstrap_servers), **PRODUCER_SETTINGS))

    async def start(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._consumer.start()
            await check_topics(self._consumer, [self._partition.topic])
            self._consumer.assign([self._partition])
            await self._producer.start()
            await publish_schemas(self._producer, default_codec().schemas())

    async def stop(self) -> None:
        for client in (self._consumer, self._producer):
            await stop_client(client, _STOP_S)

    async def all(self) -> dict[str, Stored[R]]:
        """Those there are, by name. Raises CodecError for one that cannot be read."""
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            await self._read()
            return {name: self._stored(raw) for name, raw in self._raw.items()}

    async def get(self, name: str) -> Stored[R] | None:
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            await self._read()
            raw = self._raw.get(name)
            return None if raw is None else self._stored(raw)

    async def edit(
        self, name: str, change: Callable[[R | None], R | None], expected: int | None = None
    ) -> Stored[R] | None:
        """Puts what `change` makes of the record in force everywhere within two seconds.

        `change` gets None where there is no such record, and gives None to delete it. It may be called again,
        when another's change came first; not where `expected` is the version it was thought of.

        Raises what `change` raises, VersionConflictError.
        """
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            for _ in range(_MAX_TRIES):
                await self._read()
                version, raw = self._log.version(name), self._raw.get(name)
                if expected is not None and version != expected:
                    raise VersionConflictError(self._kind.__name__.lower(), name, version)
                record = change(None if raw is None else self._stored(raw).record)
                if await self._write(name, None if record is None else encode(record), version):
                    written = self._raw.get(name)
                    at = 0 if written is None else written.at
                    return None if record is None else Stored(record, self._log.version(name), at)
            raise VersionConflictError(self._kind.__name__.lower(), name, self._log.version(name))

    async def _write(self, name: str, value: bytes | None, replaces: int) -> bool:
        """Whether it counts."""
        if value is None and replaces == NOTHING:
            return True
        # 1. The record. Nobody takes it for true that read another one before it.
        offset = await self._append(name, value, replaces)
        # 2. What has come of it.
        await self._read()
        if offset not in self._lost:
            return True
        # 3. It must not be the last of its name when the log is compacted: what is in force follows it. If
        #    this process ends before, that is so only until the next change.
        while offset in self._lost:
            self._lost.discard(offset)
            raw = self._raw.get(name)
            offset = await self._append(name, None if raw is None else raw.value, self._log.version(name))
            await self._read()
        return False

    async def _append(self, name: str, value: bytes | None, replaces: int) -> int:
        metadata = await self._producer.send_and_wait(
            self._partition.topic, value, key=name.encode(), partition=0, headers=[replaces_header(replaces)]
        )
        offset: int = metadata.offset
        return offset

    async def _read(self) -> None:
        end = (await self._consumer.end_offsets([self._partition]))[self._partition]
        while await self._consumer.position(self._partition) < end:
            batch = await self._consumer.getmany(self._partition, timeout_ms=_POLL_MS)
            for record in batch.get(self._partition, []):
                name = (record.key or b"").decode(errors="replace")
                if not self._log.counts(name, record.offset, record.headers, record.value is None):
                    self._lost.add(record.offset)
                elif record.value is None:
                    self._raw.pop(name, None)
                else:
                    self._raw[name] = _Raw(record.value, record.offset, record.timestamp)

    def _stored(self, raw: _Raw) -> Stored[R]:
        record = decode(raw.value)
        if not isinstance(record, self._kind):
            raise CodecError(f"offset {raw.offset} of {self._partition.topic} is a {type(record).__name__}")
        return Stored(record, raw.offset, raw.at)


class TenantStore(ControlStore[Tenant]):
    def __init__(self, bootstrap_servers: str, layout: Layout) -> None:
        super().__init__(bootstrap_servers, topics.TENANTS, Tenant)
        self._servers, self._layout = bootstrap_servers, layout
        self._access = BrokerAccess(bootstrap_servers)

    async def open_topics(self, name: str) -> KafkaLogin | None:
        """The tenant's batch topics, before the tenant: who learns of it finds them.

        Returns what its Kafka clients log in with, where the brokers ask for it. Raises TopicError.
        """
        await create_tenant_topics(self._servers, name, self._layout)
        return await self.new_login(name)

    async def new_login(self, name: str) -> KafkaLogin | None:
        """With a new password; the one before is good no more. None where the brokers ask for none."""
        return await self._access.grant(name) if self._access.guarded else None

    async def close_topics(self, name: str) -> None:
        """Its Kafka clients are shut out, where the brokers ask for a login. Raises TopicError."""
        if self._access.guarded:
            await self._access.revoke(name)


class ModelStore(ControlStore[Model]):
    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers, topics.MODELS, Model)


class PriceStore(ControlStore[Price]):
    """Its names are those of `price_key`."""

    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers, topics.PRICES, Price)


class SpendStore(ControlStore[Spend]):
    """Its names are those of `spend_key`. The ledger writes it, others read."""

    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers, topics.SPEND, Spend)

    async def standings(self, tenants: Iterable[Tenant], month: str) -> dict[str, Standing]:
        """Of those that have a budget, by name. Raises BudgetError for what cannot be believed."""
        told = await self.all()
        found = {}
        for tenant in tenants:
            if tenant.budget is not None:
                stored = told.get(spend_key(tenant.name, month))
                last = None if stored is None else Told(stored.record, stored.version, stored.at)
                found[tenant.name] = Standing(tenant.name, month, tenant.budget, last)
        return found
