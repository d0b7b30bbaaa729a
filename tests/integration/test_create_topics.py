import asyncio
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError
from typer.testing import CliRunner, Result

from infra.cli import app
from infra.local.broker import Broker
from infra.topics.create import TopicError, create, create_tenant_topics, create_topics
from schemas.topics import NEEDED, SPEND, Layout, TopicSpec, batch_requests, topic_specs
from tests.service_process import ServiceProcess

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)


def spec(partitions: int = 1) -> TopicSpec:
    return TopicSpec(f"test-{uuid.uuid4().hex}", partitions, {"retention.ms": "60000"})


async def partitions_and_settings(broker: Broker, topic: str) -> tuple[int, dict[str, str]]:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        description = (await admin.describe_topics([topic]))[0]
        answer = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        settings = {entry[0]: entry[1] for entry in answer[0].resources[0][4]}
        return len(description["partitions"]), settings
    finally:
        await admin.close()


async def test_the_whole_layout_is_created_once(broker: Broker) -> None:
    created = await create_topics(broker.bootstrap_servers, LAYOUT)
    specs = topic_specs(LAYOUT)
    assert sorted(created) == sorted(spec.name for spec in specs)
    assert await create_topics(broker.bootstrap_servers, LAYOUT) == []
    for expected in specs[:2]:
        count, settings = await partitions_and_settings(broker, expected.name)
        assert count == expected.partitions
        assert expected.config.items() <= settings.items()

    # Another layout on the same data is refused, with all that differs.
    with pytest.raises(TopicError, match=r"inference\.requests: has 6 partitions, the layout needs 9"):
        await create_topics(broker.bootstrap_servers, replace(LAYOUT, shards=3))


async def test_a_tenants_topics(broker: Broker) -> None:
    created = await create_tenant_topics(broker.bootstrap_servers, "demo-1", LAYOUT)
    assert batch_requests("demo-1") in created
    assert await create_tenant_topics(broker.bootstrap_servers, "demo-1", LAYOUT) == []
    with pytest.raises(ValueError, match="tenant name"):
        await create_tenant_topics(broker.bootstrap_servers, "Demo!", LAYOUT)


async def test_topics_that_are_missing_are_added_to_those_that_exist(broker: Broker) -> None:
    old, new = spec(), spec(3)
    assert await create(broker.bootstrap_servers, [old], 1) == [old.name]
    assert await create(broker.bootstrap_servers, [old, new], 1) == [new.name]


async def test_a_process_that_misses_a_topic_names_it_and_ends(own_broker: Broker, tmp_path: Path) -> None:
    """As after an update of a deployment that was made before there were budgets."""
    servers = own_broker.bootstrap_servers
    await create(servers, [each for each in topic_specs(LAYOUT) if each.name != SPEND], 1)
    simulated = {"HEADRACE_MODELS_DIR": str(tmp_path), "HEADRACE_MODELS": "simulated"}
    settings = {"HEADRACE_SQL_PORT": "0", "HEADRACE_DATA_DIR": str(tmp_path / "data"), **simulated}
    services = {
        name: ServiceProcess(module, name, servers, LAYOUT, 0, tmp_path, own)
        for name, module, own in (
            ("admission", ["streams", "admission"], {}),
            ("ledger", ["streams", "ledger"], settings),
            ("gateway", ["gateway"], simulated),
        )
    }
    try:
        for name, service in services.items():
            status = await asyncio.to_thread(service.process.wait, 60)
            said = service.log_file.read_text()
            assert (name, status) == (name, 1), said
            assert f"needs are not there: {SPEND}. Make them with `headrace topics`" in said
            assert "Traceback" not in said
    finally:
        for service in services.values():
            service.kill()

    async def headrace(*arguments: str) -> Result:
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*arguments, "--kafka", servers]))

    assert (await headrace("tenant", "create", "thrifty", "--budget", "4")).exit_code == 0
    told = await headrace("tenant", "show", "thrifty")
    assert told.exit_code == 1
    assert f"not there: {SPEND}" in told.stderr
    # What it says to do.
    counts = ("--shards", "2", "--worker-slots", "2", "--gateway-slots", "2")
    made = await headrace("topics", *counts, "--replication", "1", "--min-isr", "1")
    assert made.stdout.strip() == SPEND
    restarted = ServiceProcess(["streams", "admission"], "admission", servers, LAYOUT, 0, tmp_path, {})
    try:
        await asyncio.to_thread(restarted.wait_ready)
    finally:
        restarted.kill()


def test_what_a_process_needs_is_made() -> None:
    made = {each.name for each in topic_specs(LAYOUT)}
    for needed in NEEDED.values():
        assert set(needed) <= made


async def test_a_refused_topic_is_named_with_the_brokers_reason(broker: Broker) -> None:
    good = spec()
    with pytest.raises(TopicError, match=r"bad name!: the broker answered error 17"):
        await create(broker.bootstrap_servers, [good, TopicSpec("bad name!", 1, {})], 1)
    with pytest.raises(TopicError, match=r"error 38 .*replication"):
        await create(broker.bootstrap_servers, [spec()], replication=3)


async def test_a_broker_that_is_not_there_is_an_error_within_the_timeout() -> None:
    with pytest.raises(KafkaConnectionError):
        await create("127.0.0.1:9", [spec()], 1, timeout=5)
