"""Compressed batches on tenants' topics, over a real broker: all codecs, and some that unpack to too much."""

import json
from collections.abc import AsyncIterator
from typing import Any

import confluent_kafka
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer

from schemas import topics
from streams.ledger.tenant_batches import MAX_UNPACKED_BYTES
from tests.integration.test_ledger_process import dead_letters, tenant_with_topics
from tests.integration.test_ledger_topic_door import BODY, LAYOUT
from tests.ledger_driver import LedgerDriver, echo
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
CODECS = ("gzip", "snappy", "lz4", "zstd")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LedgerProcess]:
    ledger = LedgerProcess(kafka, LAYOUT, tmp_path_factory.mktemp("packed-ledger") / "data")
    await ledger.start()
    yield ledger
    await ledger.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(kafka: str) -> AsyncIterator[LedgerDriver]:
    async with LedgerDriver(kafka, LAYOUT, echo) as driver:
        yield driver


def item(custom_id: str, **more: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, **BODY, **more}).encode()


async def test_each_codec_of_kafkas_clients_is_read(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    results = await tenant_with_topics(kafka, driver, "packed")
    for codec in CODECS:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": kafka, "compression.type": codec, "linger.ms": 50}
        )
        for number in range(3):
            producer.produce(topics.batch_requests("packed"), item(f"{codec}-{number}", prompt="hi " * 200))
        assert producer.flush(10) == 0
    answers = [json.loads(value) for value in await results.take(12)]
    assert {a["custom_id"] for a in answers} == {f"{codec}-{n}" for codec in CODECS for n in range(3)}
    assert all(answer["error"] is None for answer in answers)


@pytest.mark.parametrize("codec", CODECS)
async def test_a_batch_that_unpacks_to_too_much_is_refused_and_holds_up_nobody(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, codec: str
) -> None:
    tenant = f"bomb-{codec}"
    results = await tenant_with_topics(kafka, driver, tenant)
    producer: Any = AIOKafkaProducer(
        bootstrap_servers=kafka, compression_type=codec, max_request_size=2 * MAX_UNPACKED_BYTES
    )
    await producer.start()
    try:
        topic = topics.batch_requests(tenant)
        await producer.send_and_wait(topic, item("before"))
        await producer.send_and_wait(topic, b" " * (MAX_UNPACKED_BYTES + 1))
        await producer.send_and_wait(topic, item("after"))
    finally:
        await producer.stop()
    answers = {a["custom_id"]: a for a in map(json.loads, await results.take(3))}
    assert answers["before"]["text"] == answers["after"]["text"] == "ab"
    error = answers[None]["error"]
    assert error["code"] == "unreadable_batch"
    assert error["message"].startswith("records 1 to 1 cannot be read: ")
    (letter,) = await dead_letters(kafka, topics.dlq(topic), 1)
    assert dict(letter.headers)["reason"].decode() == error["message"]
