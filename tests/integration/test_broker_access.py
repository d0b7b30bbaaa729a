"""A broker that asks for a login: what a tenant's own clients may do, and what nobody else may."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from gateway.broker_access import BrokerAccess
from infra.local.broker import Broker, BrokerError
from infra.tenants import TenantError, delete_tenant, make_tenant, new_login
from infra.topics.create import create_topics
from schemas import topics
from schemas.kafka_login import KafkaLogin, KafkaServers, client_settings
from schemas.records import Tenant
from schemas.topics import Layout

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=1, worker_slots=1, gateway_slots=1)
TIMEOUT_S = 20.0
Login = Callable[[str], KafkaServers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Broker]:
    broker = Broker(tmp_path_factory.mktemp("guarded"), auth=True)
    try:
        await broker.start()
        await create_topics(broker.bootstrap_servers, LAYOUT)
        yield broker
        await broker.stop()
    finally:
        broker.kill()


async def make(broker: Broker, name: str) -> KafkaServers:
    """A new tenant; what its clients use."""
    access = await make_tenant(broker.bootstrap_servers, LAYOUT, Tenant(name, 2, [], []))
    assert access.login is not None
    assert access.login.user == f"tenant-{name}"
    return KafkaServers(str(broker.bootstrap_servers), access.login)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acme(broker: Broker) -> KafkaServers:
    return await make(broker, "acme")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(broker: Broker) -> KafkaServers:
    """Whose name begins as the other's does."""
    return await make(broker, "acme-2")


async def write(servers: str, topic: str, value: bytes = b"x", **settings: Any) -> None:
    producer = AIOKafkaProducer(**client_settings(servers), **settings)
    async with asyncio.timeout(TIMEOUT_S):
        try:
            await producer.start()
            if "transactional_id" in settings:
                async with producer.transaction():
                    await producer.send_and_wait(topic, value)
            else:
                await producer.send_and_wait(topic, value)
        finally:
            await producer.stop()


async def read(servers: str, topic: str, group: str) -> bytes:
    """The first record of the topic."""
    consumer = AIOKafkaConsumer(
        topic,
        **client_settings(servers),
        group_id=group,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    async with asyncio.timeout(TIMEOUT_S):
        try:
            await consumer.start()
            record = await consumer.getone()
            await consumer.commit()
            value: bytes = record.value
            return value
        finally:
            await consumer.stop()


async def until_refused(servers: str, topic: str) -> None:
    """A password that was replaced is good until the broker has heard of it from its controller."""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            while True:
                await write(servers, topic)
        except KafkaConnectionError:
            return


async def test_a_tenant_writes_its_requests_and_reads_its_results(broker: Broker, acme: KafkaServers) -> None:
    mine = topics.batch_requests("acme")
    await write(acme, mine, b"plain")
    await write(acme, mine, b"idempotent", enable_idempotence=True)
    await write(acme, mine, b"together", transactional_id="acme.loader")
    await write(broker.bootstrap_servers, topics.batch_results("acme"), b"answer")
    assert await read(acme, topics.batch_results("acme"), "acme.reader") == b"answer"
    assert await read(broker.bootstrap_servers, mine, "ledger") == b"plain"


async def test_it_writes_nothing_else(acme: KafkaServers, other: KafkaServers) -> None:
    for topic in (
        topics.batch_requests("acme-2"),
        topics.batch_results("acme"),
        topics.dlq(topics.batch_requests("acme")),
        topics.REQUESTS,
        topics.USAGE,
        topics.TENANTS,
        topics.BATCH_JOBS,
    ):
        with pytest.raises(TopicAuthorizationFailedError):
            await write(acme, topic)
    for stranger in ("headrace-batch-0", "acme-2.loader"):
        with pytest.raises(TransactionalIdAuthorizationFailed):
            await write(acme, topics.batch_requests("acme"), transactional_id=stranger)
    await write(acme, topics.batch_requests("acme"))


async def test_it_reads_nothing_else(broker: Broker, acme: KafkaServers, other: KafkaServers) -> None:
    for topic in (
        topics.batch_requests("acme"),
        topics.batch_results("acme-2"),
        topics.USAGE,
        topics.TOKENS,
    ):
        await write(broker.bootstrap_servers, topic)
        with pytest.raises(TopicAuthorizationFailedError):
            await read(acme, topic, "acme.reader")
    for group in ("ledger", "acme", "acme-2.reader"):
        with pytest.raises(GroupAuthorizationFailedError):
            await read(acme, topics.batch_results("acme"), group)


async def test_nobody_comes_in_without_a_login(broker: Broker, acme: KafkaServers) -> None:
    assert acme.login is not None
    for login in (
        None,
        KafkaLogin(acme.login.user, "a guess"),
        KafkaLogin("headrace", acme.login.password),
        KafkaLogin("tenant-nobody", acme.login.password),
    ):
        with pytest.raises(KafkaConnectionError):
            await write(KafkaServers(str(acme), login), topics.batch_requests("acme"))


async def test_a_new_login_replaces_the_last_and_a_deleted_tenant_has_none(broker: Broker) -> None:
    servers = broker.bootstrap_servers
    first, mine = await make(broker, "brief"), topics.batch_requests("brief")
    second = KafkaServers(str(servers), await new_login(servers, "brief"))
    await until_refused(first, mine)
    producer = AIOKafkaProducer(**client_settings(second))
    await producer.start()
    try:
        await producer.send_and_wait(mine, b"x")
        await delete_tenant(servers, "brief")
        # Who is connected stays so, and may do nothing.
        with pytest.raises(TopicAuthorizationFailedError):
            await producer.send_and_wait(mine, b"x")
    finally:
        await producer.stop()
    with pytest.raises(KafkaConnectionError):
        await write(second, mine)
    with pytest.raises(TenantError, match="no tenant is called"):
        await new_login(servers, "brief")
    await BrokerAccess(servers).revoke("brief")  # again, as after a crash in the middle
    # The name is free again, with a login of its own.
    await write(await make(broker, "brief"), mine)


async def test_a_broker_keeps_its_users_and_says_so_where_it_has_none(tmp_path: Any) -> None:
    broker = Broker(tmp_path, auth=True)
    try:
        await broker.start()
        password = broker.password_file
        assert password.stat().st_mode & 0o077 == 0
        assert (tmp_path / "kafka" / "server.properties").stat().st_mode & 0o077 == 0
        assert password.read_text() not in repr(broker.bootstrap_servers.login)
        await create_topics(broker.bootstrap_servers, LAYOUT)
        servers = await make(broker, "kept")
        await broker.stop()
        await broker.start()
        assert servers.login is not None
        await write(KafkaServers(str(broker.bootstrap_servers), servers.login), topics.batch_requests("kept"))
    finally:
        broker.kill()
    password.unlink()
    with pytest.raises(BrokerError, match="without broker authentication"):
        await Broker(tmp_path, auth=True).start()
