"""control.tenants for administrators: read to its end, and changed only as it was read.

Two who change the same tenant at a time do not overwrite one another: see schemas/tenant_log.py.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.topic_admin import create_tenant_topics
from schemas import topics
from schemas.codec import CodecError, decode, default_codec, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS, publish_schemas
from schemas.records import Tenant
from schemas.tenant_log import NOTHING, TenantLog, replaces_header
from schemas.topics import Layout

TIMEOUT_S = 30.0
_POLL_MS = 500
_STOP_S = 5.0
_MAX_TRIES = 5
_TENANTS = TopicPartition(topics.TENANTS, 0)
_SETTINGS = {**CONSUMER_SETTINGS, "auto_offset_reset": "earliest", "fetch_max_wait_ms": 50}

Change = Callable[[Tenant | None], Tenant | None]


class VersionConflictError(Exception):
    """The tenant is not as it was when the change was thought of. `version`: the one in force."""

    def __init__(self, name: str, version: int) -> None:
        self.version = version
        super().__init__(f"tenant {name} was changed meanwhile: its version is {version}")


@dataclass(frozen=True, slots=True)
class Stored:
    """`version` is the offset of its record."""

    tenant: Tenant
    version: int


@dataclass(frozen=True, slots=True)
class _Raw:
    value: bytes
    offset: int


class TenantStore:
    """Every method raises TimeoutError and KafkaError when Kafka does not answer; `start` first."""

    def __init__(self, bootstrap_servers: str, layout: Layout) -> None:
        self._servers = bootstrap_servers
        self._layout = layout
        self._lock = asyncio.Lock()
        self._log = TenantLog()
        self._raw: dict[str, _Raw] = {}
        self._lost: set[int] = set()
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, **_SETTINGS)
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, **PRODUCER_SETTINGS)

    async def start(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._consumer.start()
            self._consumer.assign([_TENANTS])
            await self._producer.start()
            await publish_schemas(self._producer, default_codec().schemas())

    async def stop(self) -> None:
        for client in (self._consumer, self._producer):
            with suppress(TimeoutError):
                await asyncio.wait_for(client.stop(), _STOP_S)

    async def all(self) -> dict[str, Stored]:
        """Those there are, by name. Raises CodecError for one that cannot be read."""
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            await self._read()
            return {name: _stored(raw) for name, raw in self._raw.items()}

    async def get(self, name: str) -> Stored | None:
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            await self._read()
            raw = self._raw.get(name)
            return None if raw is None else _stored(raw)

    async def create_topics(self, name: str) -> None:
        """The tenant's batch topics, before the tenant: who learns of it finds them. Raises TopicError."""
        await create_tenant_topics(self._servers, name, self._layout)

    async def edit(self, name: str, change: Change, expected: int | None = None) -> Stored | None:
        """Puts what `change` makes of the tenant in force everywhere within two seconds.

        `change` gets None where there is no such tenant, and gives None to delete it. It may be called again,
        when another's change came first; not where `expected` is the version it was thought of.

        Raises what `change` raises, VersionConflictError.
        """
        async with self._lock, asyncio.timeout(TIMEOUT_S):
            for _ in range(_MAX_TRIES):
                await self._read()
                version, raw = self._log.version(name), self._raw.get(name)
                if expected is not None and version != expected:
                    raise VersionConflictError(name, version)
                tenant = change(None if raw is None else _stored(raw).tenant)
                if await self._write(name, None if tenant is None else encode(tenant), version):
                    return None if tenant is None else Stored(tenant, self._log.version(name))
            raise VersionConflictError(name, self._log.version(name))

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
            topics.TENANTS, value, key=name.encode(), partition=0, headers=[replaces_header(replaces)]
        )
        offset: int = metadata.offset
        return offset

    async def _read(self) -> None:
        end = (await self._consumer.end_offsets([_TENANTS]))[_TENANTS]
        while await self._consumer.position(_TENANTS) < end:
            batch = await self._consumer.getmany(_TENANTS, timeout_ms=_POLL_MS)
            for record in batch.get(_TENANTS, []):
                name = (record.key or b"").decode(errors="replace")
                if not self._log.counts(name, record.offset, record.headers, record.value is None):
                    self._lost.add(record.offset)
                elif record.value is None:
                    self._raw.pop(name, None)
                else:
                    self._raw[name] = _Raw(record.value, record.offset)


def _stored(raw: _Raw) -> Stored:
    tenant = decode(raw.value)
    if not isinstance(tenant, Tenant):
        raise CodecError(f"offset {raw.offset} of {topics.TENANTS} is a {type(tenant).__name__}")
    return Stored(tenant, raw.offset)
