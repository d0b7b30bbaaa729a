"""Tenants as the log holds them: created, listed, changed through control.tenants."""

import asyncio
from dataclasses import replace

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.topics.create import create_tenant_topics
from schemas import topics
from schemas.api_keys import new_key
from schemas.codec import CodecError, decode, default_codec, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS, publish_schemas
from schemas.records import ClassLimits, Tenant
from schemas.topics import Layout

TIMEOUT_S = 30.0
_FROM_THE_BEGINNING = {**CONSUMER_SETTINGS, "auto_offset_reset": "earliest"}


class TenantError(ValueError):
    """What was asked of a tenant cannot be done; the message says why."""


async def read_tenants(kafka: str) -> dict[str, Tenant]:
    """All tenants by name: the newest record of each key. Raises TimeoutError."""
    tenants: dict[str, Tenant] = {}
    partition = TopicPartition(topics.TENANTS, 0)
    async with asyncio.timeout(TIMEOUT_S):
        consumer = AIOKafkaConsumer(bootstrap_servers=kafka, **_FROM_THE_BEGINNING)
        try:
            await consumer.start()
            consumer.assign([partition])
            end = (await consumer.end_offsets([partition]))[partition]
            while await consumer.position(partition) < end:
                for record in (await consumer.getmany(timeout_ms=500)).get(partition, []):
                    name = record.key.decode()
                    if record.value is None:
                        tenants.pop(name, None)
                        continue
                    try:
                        tenants[name] = decode(record.value)
                    except CodecError as e:
                        raise TenantError(f"tenant {name} in {topics.TENANTS} cannot be read: {e}") from e
        finally:
            await consumer.stop()
    return tenants


async def write_tenant(kafka: str, tenant: Tenant) -> None:
    """In force everywhere within two seconds. Raises TimeoutError, KafkaError."""
    async with asyncio.timeout(TIMEOUT_S):
        producer = AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS)
        try:
            await producer.start()
            await publish_schemas(producer, default_codec().schemas())
            await producer.send_and_wait(
                topics.TENANTS, encode(tenant), key=tenant.name.encode(), partition=0
            )
        finally:
            await producer.stop()


async def create_tenant(kafka: str, layout: Layout, name: str, tier: int, limits: list[ClassLimits]) -> str:
    """Makes the tenant with its batch topics and returns its API key, which is stored nowhere.

    Raises ValueError for a bad name, TenantError when it exists.
    """
    topics.check_tenant(name)
    if name in await read_tenants(kafka):
        raise TenantError(f"tenant {name} exists; `headrace tenant key {name}` makes another key for it")
    # 1. Its topics, so that whoever learns of the tenant finds them. A run that ends here is repeated whole.
    await create_tenant_topics(kafka, name, layout)
    # 2. The tenant itself.
    key, entry = new_key()
    await write_tenant(kafka, Tenant(name=name, tier=tier, keys=[entry], limits=limits))
    return key


async def add_key(kafka: str, name: str) -> str:
    """One more key for a tenant that exists. Raises TenantError."""
    tenant = (await read_tenants(kafka)).get(name)
    if tenant is None:
        raise TenantError(f"no tenant is called {name!r}; `headrace tenant list` shows them")
    key, entry = new_key()
    await write_tenant(kafka, replace(tenant, keys=[*tenant.keys, entry]))
    return key
