"""Batches over HTTP and a real broker: what one gateway is told, another knows; states come from the log."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.outbox import Outbox
from infra.local.broker import Broker
from schemas import topics
from schemas.codec import decode, encode
from schemas.records import BatchCancel, BatchJob, BatchPart, BatchState
from schemas.stored_files import (
    KEPT_MS,
    ObjectPart,
    StoredFile,
    content,
    new_file_id,
    part_name,
    result_file_id,
)
from schemas.topics import Layout
from tests.gateway_factories import FREE_KEY, KEY, Call, Stand
from tests.own_broker import own_broker

LAYOUT = Layout(shards=4, worker_slots=2, gateway_slots=2)
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/generate",
    "body": {"model": "simulated", "prompt": "x"},
}
MESSAGE = {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker


@asynccontextmanager
async def gateway(broker: Broker, folder: Path) -> AsyncIterator[Stand]:
    stand = Stand(kafka=broker.bootstrap_servers, object_store=str(folder), shards=LAYOUT.shards)
    outbox = stand.serving.outbox = Outbox(broker.bootstrap_servers, lambda *_: None)
    await outbox.start()
    try:
        yield stand
    finally:
        await stand.serving.stores.close()
        await outbox.stop()


@pytest.fixture
async def stand(broker: Broker, tmp_path: Path) -> AsyncIterator[Stand]:
    async with gateway(broker, tmp_path) as stand:
        yield stand


async def ask(stand: Stand, method: str, path: str, body: object = None, key: str = KEY) -> Call:
    path, _, query = path.partition("?")
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    call = stand.call(method, path, body=data, key=key, query=query.encode(), headers=[(b"host", b"here")])
    async with asyncio.timeout(30):
        await call.task
    return call


async def stored(
    stand: Stand, text: bytes, tenant: str = "acme", purpose: str = "batch", kept_ms: int = KEPT_MS
) -> str:
    now_ms = time.time_ns() // 1_000_000
    file_id = new_file_id(now_ms)
    name = content(tenant, file_id)

    async def pieces() -> AsyncIterator[bytes]:
        yield text

    await stand.serving.files.write(name, pieces())
    await stand.serving.files.note(
        StoredFile(
            id=file_id,
            tenant=tenant,
            filename="in.jsonl",
            purpose=purpose,
            bytes=len(text),
            created_at=now_ms,
            expires_at=now_ms + kept_ms,
            parts=[ObjectPart(name, len(text))],
        )
    )
    return file_id


async def openai_batch(stand: Stand, **changes: Any) -> dict[str, Any]:
    file_id = await stored(stand, json.dumps(LINE).encode())
    body = {"input_file_id": file_id, "endpoint": "/v1/generate", "completion_window": "24h", **changes}
    call = await ask(stand, "POST", "/v1/batches", body)
    assert call.status == 200, call.content
    made: dict[str, Any] = call.json()
    return made


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def state_of(batch_id: str, status: str, **fields: Any) -> BatchState:
    return BatchState(batch_id, "acme", status, int(time.time() * 1000) + 1_000_000, **fields)


async def tell(broker: Broker, *states: BatchState, commit: bool = True) -> None:
    """As a coordinator does."""
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id="a-coordinator")
    await producer.start()
    try:
        await producer.begin_transaction()
        for state in states:
            partition = topics.tenant_shard(state.tenant, LAYOUT.shards)
            await producer.send_and_wait(
                topics.BATCH_STATES, encode(state), key=state.batch_id.encode(), partition=partition
            )
        await (producer.commit_transaction() if commit else producer.abort_transaction())
    finally:
        await producer.stop()


async def jobs(broker: Broker, tenant: str) -> list[tuple[str, Any]]:
    """(key, record) of all that was asked for."""
    partition = TopicPartition(topics.BATCH_JOBS, topics.tenant_shard(tenant, LAYOUT.shards))
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        found = []
        while await consumer.position(partition) < end:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                found += [((r.key or b"").decode(), r.value and decode(r.value)) for r in records]
        return found
    finally:
        await consumer.stop()


async def test_another_gateway_knows_a_batch_from_the_moment_it_is_made(
    broker: Broker, tmp_path: Path
) -> None:
    async with gateway(broker, tmp_path) as one, gateway(broker, tmp_path) as other:
        assert (await ask(other, "GET", "/v1/batches")).status == 200  # it has begun to read
        for _ in range(5):
            made = await openai_batch(one, metadata={"k": "v"})
            assert (await ask(other, "GET", f"/v1/batches/{made['id']}")).json() == made
        listed = (await ask(other, "GET", "/v1/batches?limit=1")).json()
        assert (listed["data"], listed["has_more"]) == ([made], True)
        behind = (await ask(other, "GET", f"/v1/batches?after={made['id']}&limit=100")).json()
        assert made["id"] not in [batch["id"] for batch in behind["data"]]
        (job,) = [record for key, record in await jobs(broker, "acme") if key == made["id"]]
        assert isinstance(job, BatchJob)
        assert (job.tenant, job.endpoint, job.metadata) == ("acme", "/v1/generate", {"k": "v"})


async def test_a_state_that_was_not_committed_does_not_count(broker: Broker, stand: Stand) -> None:
    made = await openai_batch(stand)
    running = state_of(made["id"], "in_progress", total=3, completed=1, in_progress_at=1_000)
    await tell(broker, running)
    await tell(broker, replace(running, status="failed", completed=0), commit=False)
    await tell(broker, replace(running, completed=2))
    async with asyncio.timeout(10):
        while True:
            told = (await ask(stand, "GET", f"/v1/batches/{made['id']}")).json()
            if told["request_counts"]["completed"] == 2:
                break
    assert told["status"] == "in_progress"


async def test_a_cancel_reaches_the_log_once_and_an_ended_batch_has_none(
    broker: Broker, stand: Stand
) -> None:
    made = await openai_batch(stand)
    for _ in range(2):
        told = (await ask(stand, "POST", f"/v1/batches/{made['id']}/cancel")).json()
        assert told["status"] == "cancelling"
    asked = [record for key, record in await jobs(broker, "acme") if key == f"{made['id']}/cancel"]
    assert [type(record) for record in asked] == [BatchCancel]
    await tell(broker, state_of(made["id"], "completed", ended_at=5_000))
    async with asyncio.timeout(10):
        while (call := await ask(stand, "POST", f"/v1/batches/{made['id']}/cancel")).status == 200:
            pass
    assert (call.status, call.json()["error"]["code"]) == (409, "batch_ended")


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1m"}, 400, "completion_window"),
        ({"model": "other"}, 404, "model"),
        ({"stream": True}, 400, "stream"),
    ],
)
async def test_what_cannot_be_run_is_refused_by_name(
    stand: Stand, changes: dict[str, Any], status: int, param: str
) -> None:
    file_id = await stored(stand, b"{}")
    body = {"input_file_id": file_id, "endpoint": "/v1/generate", "completion_window": "24h", **changes}
    call = await ask(stand, "POST", "/v1/batches", body)
    assert (call.status, call.json()["error"]["param"]) == (status, param)


async def test_a_file_that_expires_inside_the_window_is_refused(stand: Stand) -> None:
    file_id = await stored(stand, json.dumps(LINE).encode(), kept_ms=2 * 3_600_000)
    body = {"input_file_id": file_id, "endpoint": "/v1/generate", "completion_window": "24h"}
    call = await ask(stand, "POST", "/v1/batches", body)
    assert (call.status, call.json()["error"]["param"]) == (400, "input_file_id")
    assert re.search(r"expires in 7[12]\d\d s, which is inside the completion_window", call.content.decode())
    assert (await ask(stand, "POST", "/v1/batches", {**body, "completion_window": "1h"})).status == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
async def test_a_key_that_would_be_ignored_is_refused(stand: Stand, path: str) -> None:
    call = stand.call("POST", path, body={}, headers=[(b"idempotency-key", b"k")])
    await call.finish()
    assert (call.status, b"Idempotency-Key" in call.content) == (400, True)


async def test_another_tenants_files_and_batches_are_not_there(stand: Stand) -> None:
    made = await openai_batch(stand)
    for method, path in (("GET", ""), ("POST", "/cancel")):
        call = await ask(stand, method, f"/v1/batches/{made['id']}{path}", key=FREE_KEY)
        assert (call.status, call.json()["error"]["code"]) == (404, "batch_not_found")
    assert (await ask(stand, "GET", "/v1/batches", key=FREE_KEY)).json()["data"] == []
    theirs = await stored(stand, b"{}", tenant="cheap")
    body = {"input_file_id": theirs, "model": "simulated"}
    assert (await ask(stand, "POST", "/v1/batches", body)).status == 404


async def test_the_own_shape_and_its_counts(broker: Broker, stand: Stand) -> None:
    file_id = await stored(stand, b'{"custom_id": "a", "prompt": "x"}')
    made = (await ask(stand, "POST", "/v1/batches", {"input_file_id": file_id, "model": "simulated"})).json()
    assert made == {"batch_id": made["batch_id"], "status": "queued"}
    await tell(broker, state_of(made["batch_id"], "in_progress", total=2, failed=1))
    async with asyncio.timeout(10):
        while (told := (await ask(stand, "GET", f"/v1/batches/{made['batch_id']}")).json())[
            "status"
        ] == "queued":
            pass
    assert told["counts"] == {"total": 2, "completed": 0, "failed": 1, "expired": 0, "cancelled": 0}


def stored_output(batch_id: str, size: int) -> StoredFile:
    return StoredFile(
        id=result_file_id(batch_id, "output"),
        tenant="acme",
        filename="out.jsonl",
        purpose="batch_output",
        bytes=size,
        created_at=1,
        expires_at=1 << 60,
        parts=[ObjectPart(part_name("acme", batch_id, "output", 0, 7), size)],
    )


async def test_messages_become_lines_and_results_are_told_from_lines(broker: Broker, stand: Stand) -> None:
    requests = [{"custom_id": f"r-{i}", "params": MESSAGE} for i in range(300)]
    call = await ask(stand, "POST", "/v1/messages/batches", {"requests": requests})
    made = call.json()
    assert (made["processing_status"], made["request_counts"]["processing"]) == ("in_progress", 300)
    batch_id = made["id"]
    (job,) = [record for key, record in await jobs(broker, "acme") if key == batch_id]
    file = await stand.serving.files.find("acme", job.input_file_id, 0)
    assert file is not None
    text = b"".join([piece async for piece in stand.serving.files.read(file.parts)])
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [
        {"custom_id": r["custom_id"], "method": "POST", "url": "/v1/messages", "body": MESSAGE}
        for r in requests
    ]
    assert (file.lines, file.bytes) == (300, len(text))
    early = await ask(stand, "GET", f"/v1/messages/batches/{batch_id}/results")
    assert (early.status, early.json()["error"]["type"]) == (404, "not_found_error")

    ok = json.dumps(
        {"custom_id": "r-0", "response": {"status_code": 200, "body": {"id": "msg_1"}}, "error": None}
    )
    late = json.dumps(
        {"custom_id": "r-1", "response": None, "error": {"code": "batch_expired", "message": "-"}}
    )
    unsaid = b"\nwhat no state speaks of"
    for kind, line in (("output", ok), ("error", late)):

        async def pieces(line: str = line) -> AsyncIterator[bytes]:
            yield line.encode() + unsaid

        await stand.serving.files.write(part_name("acme", batch_id, kind, 0, 7), pieces())  # type: ignore[arg-type]
    ended = state_of(
        batch_id,
        "expired",
        total=300,
        completed=1,
        expired=299,
        output=[BatchPart(7, len(ok) + 1)],
        error_output=[BatchPart(7, len(late) + 1)],
        ended_at=int(time.time() * 1000),
    )
    await tell(broker, ended)
    async with asyncio.timeout(10):
        while (told := (await ask(stand, "GET", f"/v1/messages/batches/{batch_id}")).json())[
            "ended_at"
        ] is None:
            pass
    assert told["results_url"] == f"http://here/v1/messages/batches/{batch_id}/results"
    results = await ask(stand, "GET", f"/v1/messages/batches/{batch_id}/results")
    assert [json.loads(line) for line in results.content.splitlines()] == [
        {"custom_id": "r-0", "result": {"type": "succeeded", "message": {"id": "msg_1"}}},
        {"custom_id": "r-1", "result": {"type": "expired"}},
    ]
    output = stored_output(batch_id, len(ok) + 1)
    await stand.serving.files.note(output)  # as the coordinator does
    assert (await ask(stand, "DELETE", f"/v1/messages/batches/{batch_id}")).status == 200
    assert await stand.serving.files.find("acme", output.id, 0) is None
    for path in ("", "/results"):
        assert (await ask(stand, "GET", f"/v1/messages/batches/{batch_id}{path}")).status == 404
    assert await stand.serving.files.find("acme", job.input_file_id, 0) is None


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b'{"requests": {}}', "requests"),
        (b'{"requests": []}', "requests"),
        (b'{"requests": [{"custom_id": "a", "params": {}}', "JSON"),
        (b'{"requests": [{"custom_id": "a", "params": {}}], "metadata": {}}', "metadata"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests.0"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}', "requests.1"),
        (b'{"requests": [1]}', "requests.0"),
        (b'{"requests": [{"custom_id": "a", "params": {}}]} {}', "JSON"),
        (b"\xff\xfe", "JSON"),
    ],
)
async def test_messages_that_do_not_fit_leave_no_file(
    stand: Stand, tmp_path: Path, body: bytes, where: str
) -> None:
    call = await ask(stand, "POST", "/v1/messages/batches", body)
    assert (call.status, call.json()["error"]["type"]) == (400, "invalid_request_error")
    assert where in call.json()["error"]["message"]
    assert files_in(tmp_path) == []


async def test_a_broker_that_is_away_is_told_at_once_or_soon(tmp_path: Path) -> None:
    stand = Stand(kafka="127.0.0.1:1", object_store=str(tmp_path))
    outbox = stand.serving.outbox = Outbox("127.0.0.1:1", lambda *_: None)
    call = await ask(stand, "GET", "/v1/batches")
    assert (call.status, call.json()["error"]["code"]) == (503, "broker_unavailable")
    await outbox.stop()
