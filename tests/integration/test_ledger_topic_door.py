"""Records of batch.requests against the ledger's process and a real broker; the worker is scripted."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError

from schemas import topics
from schemas.codec import decode, encode
from schemas.records import BatchRequest, BatchResult, InferenceRequest
from schemas.topics import MAX_RECORD_BYTES, Layout
from tests.integration.test_ledger_process import Results, dead_letters, eventually, tenant_with_topics
from tests.ledger_driver import LedgerDriver, echo
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=1, worker_slots=1, gateway_slots=1)
Record = tuple[bytes, bytes | None]
BODY = {"model": "simulated", "prompt": "hi", "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LedgerProcess]:
    ledger = LedgerProcess(kafka, LAYOUT, tmp_path_factory.mktemp("door-ledger") / "data")
    await ledger.start()
    yield ledger
    await ledger.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(kafka: str) -> AsyncIterator[LedgerDriver]:
    async with LedgerDriver(kafka, LAYOUT, echo) as driver:
        yield driver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(kafka: str) -> AsyncIterator[Any]:
    """A tenant's, which may send what the broker will not take."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, max_request_size=2 * MAX_RECORD_BYTES)
    await producer.start()
    yield producer
    await producer.stop()


async def publish(producer: Any, tenant: str, *records: Record) -> None:
    for value, batch in records:
        headers = [] if batch is None else [("batch", batch)]
        await producer.send_and_wait(topics.batch_requests(tenant), value, headers=headers)


def three_shapes(custom_id: str) -> list[bytes]:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/generate", "body": BODY}
    own = {"custom_id": custom_id, **BODY}
    avro = encode(BatchRequest(custom_id, json.dumps(BODY)))
    return [json.dumps(own).encode(), json.dumps(line).encode(), avro]


def shape(value: bytes) -> str:
    if value.startswith(b"\xc3\x01"):
        return "avro"
    return "line" if "response" in json.loads(value) else "own"


async def test_a_header_makes_batches_and_comes_back(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, producer: Any
) -> None:
    results = await tenant_with_topics(kafka, driver, "groups")
    sent = [(value, batch) for batch in (b"night", b"day", None) for value in three_shapes("a")]
    bad = json.dumps({"custom_id": "bad", "model": "simulated", "prompt": 3}).encode()
    await publish(producer, "groups", *sent, (bad, b"night"), (b"{", b"day"))
    await results.take(11)
    seen = [(shape(r.value), dict(r.headers).get("batch")) for r in results.records]
    for batch in (b"night", b"day", None):
        for kind in ("own", "line", "avro"):
            assert (kind, batch) in seen
    assert seen.count(("own", b"night")) == seen.count(("own", b"day")) == 2  # one of them is the error
    ran = [request.request_id.hex() for request in driver.requests if request.tenant == "groups"]
    told = [dict(r.headers).get("request_id", b"").decode() for r in results.records]
    assert len(ran) == len(set(ran)) == 9
    assert sorted(told) == ["", "", *sorted(ran)]
    letters = await dead_letters(kafka, topics.dlq(topics.batch_requests("groups")), 2)
    assert [dict(letter.headers)["batch"] for letter in letters] == [b"night", b"day"]


async def test_a_producers_retry_is_not_run_again_whatever_happened_between(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, producer: Any
) -> None:
    results = await tenant_with_topics(kafka, driver, "retries")
    failing = json.dumps({"custom_id": "late", **BODY, "seed": 1}).encode()
    sent: list[Record] = [(value, b"b") for value in three_shapes("a")]
    await publish(producer, "retries", *sent)
    first = sorted(await results.take(3))
    await ledger.kill()
    await ledger.start()
    # Nothing of it is in this life's memory, nor in the part of the log that it reads at the start.
    await publish(producer, "retries", *sent, (failing, b"b"), *sent)
    values = await results.take(10)
    assert sorted(values[3:6]) == first
    assert [values.count(value) for value in first] == [3, 3, 3]
    assert len([r for r in driver.requests if r.tenant == "retries"]) == 4
    await eventually(ledger, "SELECT requests, output_tokens FROM billing WHERE tenant='retries'", "4\t8\n")


async def test_choices_outlive_the_ledger_and_are_one_answer_in_each_encoding(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, producer: Any
) -> None:
    results = await tenant_with_topics(kafka, driver, "choices")
    late = asyncio.Event()
    seen: list[bytes] = []

    async def every_second_late(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        seen.append(request.request_id)
        if len(seen) % 2 == 0 and not late.is_set():
            await late.wait()
        await echo(driver, request, offset)

    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "simulated", "messages": messages, "max_tokens": 2, "n": 2}
    url = "/v1/chat/completions"
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
    sent: list[Record] = [(line, None), (encode(BatchRequest("a", json.dumps(body), url=url)), None)]
    driver.serve = every_second_late
    try:
        await publish(producer, "choices", *sent)
        async with asyncio.timeout(20):
            while len(seen) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        await ledger.kill()
        await ledger.start()
        late.set()
        first = await results.take(2)
    finally:
        driver.serve = echo
    await publish(producer, "choices", *sent)
    values = await results.take(4)
    assert sorted(values[2:]) == sorted(first)
    assert {shape(value) for value in first} == {"line", "avro"}
    for value in first:
        if shape(value) == "avro":
            result = decode(value)
            assert isinstance(result, BatchResult)
            answer = json.loads(result.body or "")
        else:
            answer = json.loads(value)["response"]["body"]
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["ab", "ab"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 4
    ran = {request.request_id for request in driver.requests if request.tenant == "choices"}
    assert len(ran) == 4
    await eventually(ledger, "SELECT requests, output_tokens FROM billing WHERE tenant='choices'", "4\t8\n")


async def test_a_record_is_as_large_as_the_broker_takes_it(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, producer: Any
) -> None:
    results = await tenant_with_topics(kafka, driver, "large")
    room = MAX_RECORD_BYTES - 100
    own = {"custom_id": "long", **BODY}
    long = json.dumps({**own, "prompt": "x" * (room - 200)}).encode()
    poison = b"\xff" * room
    good = json.dumps({**own, "custom_id": "good"}).encode()
    with pytest.raises(MessageSizeTooLargeError):
        await publish(producer, "large", (b"x" * (MAX_RECORD_BYTES + 1), None))
    await publish(producer, "large", (long, None), (poison, None), (good, None))
    answers = [json.loads(value) for value in await results.take(3)]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert by_id["good"]["text"] == "ab"
    assert by_id["long"]["error"]["code"] == "context_length_exceeded"
    assert by_id[None]["error"]["code"] == "invalid_json"
    letters = await dead_letters(kafka, topics.dlq(topics.batch_requests("large")), 2)
    assert [letter.value for letter in letters] == [long, poison]
    assert all(0 < len(dict(letter.headers)["reason"]) <= 2_000 for letter in letters)


async def test_a_tenant_made_while_it_runs_is_served_within_seconds(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, producer: Any
) -> None:
    results: Results = await tenant_with_topics(kafka, driver, "new")
    began = asyncio.get_running_loop().time()
    await publish(producer, "new", (three_shapes("a")[2], None))
    await results.take(1)
    assert asyncio.get_running_loop().time() - began < 5
    (record,) = results.records
    answer = decode(record.value)
    assert isinstance(answer, BatchResult)
    usage = {"input_tokens": 3, "cached_tokens": 0, "output_tokens": 2}
    assert json.loads(answer.body or "")["usage"] == usage
    assert TopicPartition(record.topic, record.partition) == TopicPartition("batch.results.new", 0)
