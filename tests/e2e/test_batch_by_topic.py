"""Batch records from a plain Kafka client, over the whole stack."""

import asyncio
import json
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.kafka_login import client_settings
from tests.e2e.conftest import RunningStack
from tests.e2e.test_streams import eventually

TIMEOUT_S = 60.0


async def _exchange(kafka: str, tenant: str, values: list[bytes], answers: int) -> list[dict[str, Any]]:
    results = TopicPartition(topics.batch_results(tenant), 0)
    producer = AIOKafkaProducer(**client_settings(kafka))
    consumer = AIOKafkaConsumer(**client_settings(kafka), isolation_level="read_committed")
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await producer.start()
            await consumer.start()
            consumer.assign([results])
            await consumer.seek_to_end(results)
            for value in values:
                await producer.send_and_wait(topics.batch_requests(tenant), value)
            while len(found) < answers:
                records = (await consumer.getmany(timeout_ms=500)).get(results, [])
                found += [json.loads(record.value) for record in records]
    finally:
        await producer.stop()
        await consumer.stop()
    return found


def exchange(
    running: RunningStack, tenant: str, values: list[Any], answers: int, kafka: str | None = None
) -> dict[Any, dict[str, Any]]:
    """Publishes and returns the answers by custom_id. `kafka`: as whom, where the broker asks."""
    raw = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    found = running.call(_exchange(kafka or running.stack.bootstrap_servers, tenant, raw, answers))
    by_id = {answer["custom_id"]: answer for answer in found}
    assert len(by_id) == len(found), "a record was answered twice"
    return by_id


def test_both_shapes_are_answered_and_billed_as_batch(simulated_stack: RunningStack) -> None:
    simulated_stack.tenant("batches")
    chat = {"model": simulated_stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    found = exchange(
        simulated_stack,
        "batches",
        [
            {"custom_id": "own", "model": simulated_stack.model, "prompt": "hi", "max_tokens": 4},
            {"custom_id": "line", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "two", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "n": 2}},
        ],
        answers=3,
    )
    two = found["two"]["response"]["body"]
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert [len(choice["message"]["content"]) for choice in two["choices"]] == [5, 5]
    assert found["own"]["usage"] == {"input_tokens": 3, "cached_tokens": 0, "output_tokens": 4}
    assert len(found["own"]["text"]) == 4
    response = found["line"]["response"]
    assert response["status_code"] == 200
    assert found["line"]["error"] is None
    assert response["body"]["usage"]["completion_tokens"] == 5
    assert len(response["body"]["choices"][0]["message"]["content"]) == 5
    assert two["usage"]["prompt_tokens"] == 2 * response["body"]["usage"]["prompt_tokens"]
    bill = "SELECT class, count(), sum(output_tokens) FROM usage_final WHERE tenant='batches' GROUP BY 1"
    eventually(lambda: simulated_stack.sql(bill) == [["batch", "4", "19"]])


def test_a_bad_record_is_answered_and_kept_and_the_next_one_is_served(simulated_stack: RunningStack) -> None:
    simulated_stack.tenant("poison")
    good = {"custom_id": "good", "model": simulated_stack.model, "prompt": "hi", "max_tokens": 2}
    found = exchange(
        simulated_stack,
        "poison",
        [b"\x00 not json", {"custom_id": "bad", "model": simulated_stack.model, "prompt": 3}, good],
        answers=3,
    )
    assert found["good"]["usage"]["output_tokens"] == 2
    assert "prompt" in found["bad"]["error"]["message"]
    assert found[None]["error"]["code"] == "invalid_json"

    dead = topics.dlq(topics.batch_requests("poison"))
    kept = simulated_stack.call(_read_all(simulated_stack.stack.bootstrap_servers, dead))
    assert kept[0][0] == b"\x00 not json"
    assert all(reason for _, reason in kept)
    assert len(kept) == 2


async def _read_all(kafka: str, topic: str) -> list[tuple[bytes, bytes]]:
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, isolation_level="read_committed")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await consumer.start()
            consumer.assign([partition])
            await consumer.seek_to_beginning(partition)
            found: list[tuple[bytes, bytes]] = []
            while len(found) < 2:
                records = (await consumer.getmany(timeout_ms=500)).get(partition, [])
                found += [(record.value, dict(record.headers)["reason"]) for record in records]
            return found
    finally:
        await consumer.stop()


def test_a_killed_ledger_answers_every_record_once(make_stack: Any) -> None:
    running: RunningStack = make_stack(step_ms=20.0)
    values: list[dict[str, Any]] = [
        {"custom_id": str(n), "model": running.model, "prompt": "hi", "max_tokens": 30} for n in range(12)
    ]

    async def kill_in_the_middle() -> list[dict[str, Any]]:
        raw = [json.dumps(value).encode() for value in values]
        answers = asyncio.create_task(_exchange(running.stack.bootstrap_servers, "acme", raw, len(raw)))
        await asyncio.sleep(0.4)
        running.stack.kill("ledger-0")
        await running.stack.restart("ledger-0")
        return await answers

    found = running.call(kill_in_the_middle())
    assert sorted(answer["custom_id"] for answer in found) == sorted(v["custom_id"] for v in values)
    eventually(lambda: running.sql("SELECT count(), sum(output_tokens) FROM usage_final") == [["12", "360"]])
