"""The ledger as a process: real Kafka, real chDB; admission and the worker are scripted."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer

from infra.topics.create import create_tenant_topics
from schemas import topics
from schemas.codec import decode, encode
from schemas.records import BatchRequest, BatchResult, InferenceRequest, Tenant, Usage
from schemas.topics import Layout
from streams.ledger.billing import billed, row_of
from tests.ledger_driver import LedgerDriver, echo
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
WAIT_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LedgerProcess]:
    ledger = LedgerProcess(kafka, LAYOUT, tmp_path_factory.mktemp("ledger") / "data")
    await ledger.start()
    yield ledger
    await ledger.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(kafka: str) -> AsyncIterator[LedgerDriver]:
    async with LedgerDriver(kafka, LAYOUT, echo) as driver:
        yield driver


class Results:
    """What a tenant sees on batch.results, read_committed, from the beginning."""

    def __init__(self, consumer: Any) -> None:
        self.records: list[Any] = []
        self._consumer = consumer

    @property
    def values(self) -> list[bytes]:
        return [record.value for record in self.records]

    async def take(self, count: int) -> list[bytes]:
        """Waits for `count` in all, and looks a moment for more."""
        async with asyncio.timeout(WAIT_S):
            while len(self.records) < count:
                await self._poll(500)
        await self._poll(300)
        return self.values

    async def _poll(self, timeout_ms: int) -> None:
        for records in (await self._consumer.getmany(timeout_ms=timeout_ms)).values():
            self.records += records


async def tenant_with_topics(kafka: str, driver: LedgerDriver, name: str) -> Results:
    await create_tenant_topics(kafka, name, LAYOUT)
    await driver.put_tenant(Tenant(name, 2, [], []))
    consumer = AIOKafkaConsumer(
        topics.batch_results(name),
        bootstrap_servers=kafka,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    driver.on_exit(consumer.stop)
    return Results(consumer)


def make_usage(rng: random.Random, tenant: str, attempt: int = 1) -> Usage:
    return Usage(
        request_id=rng.randbytes(16),
        attempt=attempt,
        sealed=False,
        tenant=tenant,
        priority=rng.randrange(3),
        model="m",
        input_tokens=rng.randrange(1000),
        cached_tokens=0,
        output_tokens=rng.randrange(1000),
        finish_reason="stop",
        accepted_at=1_764_446_000_000 + rng.randrange(10**9),
        ended_at=1_764_446_000_000,
        slot=0,
        epoch=1,
    )


async def send_usage(driver: LedgerDriver, usage: Usage) -> None:
    await driver.send(
        topics.USAGE, topics.tenant_partition(usage.tenant, usage.priority, LAYOUT.shards), usage
    )


def rows_of(tenant: str) -> str:
    columns = "request_id, version, input_tokens, output_tokens"
    return f"SELECT {columns} FROM usage_final WHERE tenant = '{tenant}' ORDER BY request_id"


def expected_rows(usages: list[Usage]) -> str:
    best = billed(map(row_of, usages))
    return "".join(
        f"{rid}\t{row.version}\t{row.input_tokens}\t{row.output_tokens}\n"
        for (_, rid), row in sorted(best.items())
    )


async def eventually(ledger: LedgerProcess, query: str, want: str) -> None:
    got = ""
    try:
        async with asyncio.timeout(WAIT_S):
            while (got := await ledger.sql(query)) != want:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        assert got == want, ledger.log_end()


async def dead_letters(kafka: str, topic: str, count: int) -> list[Any]:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await consumer.start()
    try:
        letters: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while len(letters) < count:
                batch = await consumer.getmany(timeout_ms=500)
                letters += [record for records in batch.values() for record in records]
        return letters
    finally:
        await consumer.stop()


async def test_usage_lands_and_what_is_no_usage_is_kept(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    rng = random.Random(1)
    usages = [make_usage(rng, "lands") for _ in range(30)]
    for usage in usages[:15]:
        await send_usage(driver, usage)
    await driver.send_raw(topics.USAGE, b"garbage", 2)
    await driver.send(topics.USAGE, 2, make_usage(rng, "No Tenant"))
    large = b"\xff" * (topics.MAX_RECORD_BYTES - 100)
    await driver.send_raw(topics.USAGE, large, 2)
    for usage in usages[15:]:
        await send_usage(driver, usage)
    await eventually(ledger, rows_of("lands"), expected_rows(usages))
    letters = await dead_letters(kafka, topics.dlq(topics.USAGE), 3)
    assert letters[0].value == b"garbage"
    reasons = [dict(letter.headers)["reason"].decode() for letter in letters]
    assert "not single-object Avro" in reasons[0]
    assert "No Tenant" in reasons[1]
    # As large as the topic takes: with the reason beside it the whole would be too large.
    assert large.startswith(letters[2].value)
    assert dict(letters[2].headers)["cut"] == f"value of {len(large)} bytes".encode()


async def test_sql_over_http_for_curl_and_clickhouses_client(ledger: LedgerProcess) -> None:
    url = f"http://127.0.0.1:{ledger.sql_port}/"
    async with httpx.AsyncClient() as client:
        assert (await client.get(url + "ping")).text == "Ok.\n"
        assert (await client.get(url)).text == "Ok.\n"
        assert (await client.get(url + "?query=SELECT+1")).text == "1\n"
        assert (await client.post(url, content="SELECT 1 AS x FORMAT JSONEachRow")).text == '{"x":1}\n'
        both = await client.post(url + "?query=SELECT+1&default_format=CSV", content="+ 1, 'a'")
        assert both.text == '2,"a"\n'
        assert both.headers["x-clickhouse-format"] == "CSV"
        assert json.loads(both.headers["x-clickhouse-summary"])["read_rows"] == "1"
        bad = await client.get(url, params={"query": "SELECT file('/etc/passwd')"})
        assert (bad.status_code, bad.headers["x-clickhouse-exception-code"]) == (403, "497")
        assert bad.text.startswith("Code: 497. DB::Exception: function file() is not allowed")
        drop = await client.post(url, content="DROP TABLE usage")
        assert (drop.status_code, drop.headers["x-clickhouse-exception-code"]) == (403, "164")
        assert (await client.get(url, params={"query": "SELECT nope"})).status_code == 400
        assert (await client.get(url, params={"query": "SELECT 1", "readonly": "0"})).text == "1\n"
        raised = await client.get(url, params={"query": "SELECT 1", "allow_ddl": "1"})
        assert raised.headers["x-clickhouse-exception-code"] == "164"
        lowered = await client.get(
            url, params={"query": "SELECT number FROM numbers(11)", "max_result_rows": "10"}
        )
        assert lowered.headers["x-clickhouse-exception-code"] == "396"
        assert (await client.get(url, params={"query": "SELECT 1", "database": "x"})).status_code == 404
        rebound = await client.get(url + "?query=SELECT+1", headers={"host": "evil.example:8123"})
        assert rebound.status_code == 400
        long = await client.post(url, content="SELECT " + "1," * 200_000 + "1")
        assert "Max query size exceeded" in long.text
        parameter = {"query": "SELECT {t:String}", "param_t": "'; DROP"}
        assert (await client.get(url, params=parameter)).text == "\\'; DROP\n"

    def with_the_official_client() -> tuple[Any, Any, str]:
        official = clickhouse_connect.get_client(host="127.0.0.1", port=ledger.sql_port)
        found = official.query(
            "SELECT tenant, count() AS n FROM usage_final WHERE tenant = {t:String} GROUP BY tenant",
            parameters={"t": "lands"},
        )
        with pytest.raises(clickhouse_connect.driver.exceptions.DatabaseError, match="readonly") as refused:
            official.command("DROP TABLE usage")
        official.close()
        return found.column_names, found.result_rows, str(refused.value)

    names, rows, _ = await asyncio.to_thread(with_the_official_client)
    assert names == ("tenant", "n")
    assert rows == [("lands", 30)]


async def test_a_slow_query_holds_up_no_bill_and_too_many_are_refused(
    ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    slow = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
    running = [asyncio.create_task(ledger.sql(slow, max_execution_time="12")) for _ in range(3)]
    await asyncio.sleep(0.3)
    usage = make_usage(random.Random(2), "quick")
    await send_usage(driver, usage)
    await eventually(ledger, rows_of("quick"), expected_rows([usage]))
    assert not any(task.done() for task in running)
    running += [asyncio.create_task(ledger.sql(slow, max_execution_time="3")) for _ in range(2)]
    answers = await asyncio.gather(*running)
    assert sum("Code: 202" in text for text in answers) == 1
    assert sum("Code: 159" in text for text in answers) == 4


async def test_kill_9_between_inserts_leaves_equal_rows(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    rng = random.Random(3)
    usages: list[Usage] = []
    for _ in range(2):
        for _ in range(300):
            usage = make_usage(rng, "killed", attempt=rng.randrange(1, 4))
            if usages and rng.random() < 0.3:
                usage.request_id = rng.choice(usages).request_id
            usages.append(usage)
            await send_usage(driver, usage)
        await ledger.kill()
        await ledger.start()
    await eventually(ledger, rows_of("killed"), expected_rows(usages))
    total = await ledger.sql("SELECT sum(requests) FROM billing WHERE tenant = 'killed'")
    assert int(total) == len({usage.request_id for usage in usages})


async def test_the_three_shapes_and_bad_records(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    results = await tenant_with_topics(kafka, driver, "shapes")
    source = topics.batch_requests("shapes")
    chat = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "line", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    generate = {"custom_id": "gen", "model": "simulated", "prompt": "hi", "max_tokens": 5}
    avro = BatchRequest("avro", json.dumps({"model": "simulated", "prompt": "x", "max_tokens": 2}))
    sent = [
        json.dumps(generate).encode(),
        b"{no json",
        json.dumps({**generate, "custom_id": "stream", "stream": True}).encode(),
        json.dumps(line).encode(),
        json.dumps({**line, "custom_id": "url", "url": "/v1/else"}).encode(),
        json.dumps({**line, "custom_id": "model", "body": {**chat, "model": "gpt-9"}}).encode(),
        json.dumps({**generate, "custom_id": "class", "priority": "interactive"}).encode(),
        json.dumps({"model": "simulated", "prompt": "hi"}).encode(),
        encode(avro),
        json.dumps(generate).encode(),  # a producer's own retry
    ]
    for value in sent:
        await driver.send_raw(source, value)
    values = await results.take(len(sent))
    assert len(values) == len(sent)
    avro_results = [decode(value) for value in values if value.startswith(b"\xc3\x01")]
    found = [json.loads(value) for value in values if not value.startswith(b"\xc3\x01")]
    by_id: dict[str | None, Any] = {answer["custom_id"]: answer for answer in found}

    assert [answer["text"] for answer in found if answer["custom_id"] == "gen"] == ["abcde"] * 2
    assert by_id["gen"]["usage"] == {"input_tokens": 3, "cached_tokens": 0, "output_tokens": 5}
    assert by_id["gen"]["stop_reason"] == "length"
    assert by_id["gen"]["error"] is None
    response = by_id["line"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["message"]["content"] == "abc"
    assert response["body"]["usage"]["completion_tokens"] == 3
    assert by_id["line"]["error"] is None
    assert by_id["line"]["id"].startswith("batch_req_")
    assert by_id["stream"]["error"]["param"] == "stream"
    assert by_id["class"]["error"]["param"] == "priority"
    assert by_id["url"]["response"]["body"]["error"]["param"] == "url"
    assert by_id["model"]["response"]["status_code"] == 404
    nameless = [answer for answer in found if answer["custom_id"] is None]
    assert {(answer["offset"], answer["error"]["code"]) for answer in nameless} == {
        (1, "invalid_json"),
        (7, "missing_field"),
    }
    (record,) = avro_results
    assert isinstance(record, BatchResult)
    assert (record.custom_id, record.status_code) == ("avro", 200)
    assert json.loads(record.body or "")["text"] == "ab"

    letters = await dead_letters(kafka, topics.dlq(source), 6)
    assert [letter.value for letter in letters] == [sent[i] for i in (1, 2, 4, 5, 6, 7)]
    assert all(dict(letter.headers)["reason"] for letter in letters)
    # Three ran, each once.
    ran = [request for request in driver.requests if request.tenant == "shapes"]
    assert len(ran) == len({request.request_id for request in ran}) == 3
    assert {request.priority for request in ran} == {2}
    bill = "SELECT requests, output_tokens FROM billing WHERE tenant = 'shapes'"
    await eventually(ledger, bill, "3\t10\n")


async def test_limits_and_lost_workers_and_takeovers(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    """The first is refused for now, the second loses its worker, the third its admission."""
    results = await tenant_with_topics(kafka, driver, "rough")
    tries: dict[int, int] = {}

    async def rough(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        wanted = request.sampling.max_tokens
        tries[wanted] = tries.get(wanted, 0) + 1
        if tries[wanted] > 1:
            await echo(driver, request, offset)
        elif wanted == 3:
            await driver.reject(request, 429, "rate_limit_exceeded", 1500)
        elif wanted == 4:
            await driver.dispatched(request)
            await driver.tokens(request, 0, [97, 98])
            await driver.leave_worker()
            await driver.join_worker()
        else:
            partition = topics.tenant_partition(request.tenant, 2, LAYOUT.shards)
            driver.takeover[partition] = offset + 1

    driver.serve = rough
    try:
        for count in (3, 4, 5):
            body = {"custom_id": f"n{count}", "model": "simulated", "prompt": "hi", "max_tokens": count}
            await driver.send_raw(topics.batch_requests("rough"), json.dumps(body).encode())
        answers = {a["custom_id"]: a for a in map(json.loads, await results.take(3))}
    finally:
        driver.serve = echo
    assert {name: answer["text"] for name, answer in answers.items()} == {
        "n3": "abc",
        "n4": "abcd",
        "n5": "abcde",
    }
    seen = [r for r in driver.requests if r.tenant == "rough"]
    attempts = {count: [r.attempt for r in seen if r.sampling.max_tokens == count] for count in (3, 4, 5)}
    assert attempts == {3: [1, 1], 4: [1, 2], 5: [1, 1]}
    retried = next(r for r in seen if r.attempt == 2)
    assert retried.output_token_ids == [97, 98]


async def test_a_request_that_kills_workers_fails_and_is_billed_for_what_came(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    results = await tenant_with_topics(kafka, driver, "killer")

    async def dies(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        await driver.dispatched(request)
        await driver.tokens(request, len(request.output_token_ids), [97])
        await driver.leave_worker()
        await driver.join_worker()

    driver.serve = dies
    try:
        body = {"custom_id": "x", "model": "simulated", "prompt": "hi", "max_tokens": 50}
        await driver.send_raw(topics.batch_requests("killer"), json.dumps(body).encode())
        (answer,) = map(json.loads, await results.take(1))
    finally:
        driver.serve = echo
    assert answer["error"]["code"] == "worker_lost"
    assert [r.attempt for r in driver.requests if r.tenant == "killer"] == [1, 2, 3, 4]
    row = "SELECT attempt, sealed, output_tokens, finish_reason FROM usage_final WHERE tenant = 'killer'"
    await eventually(ledger, row, "4\ttrue\t4\terror\n")


async def test_kill_9_in_the_middle_answers_each_once(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver
) -> None:
    results = await tenant_with_topics(kafka, driver, "sturdy")
    rng = random.Random(4)
    count = 120

    async def slow(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        await asyncio.sleep(rng.random() * 2)
        await echo(driver, request, offset)

    driver.serve = slow
    try:
        for i in range(count):
            body = {"custom_id": f"n{i}", "model": "simulated", "prompt": "hi", "max_tokens": 1 + i % 7}
            await driver.send_raw(topics.batch_requests("sturdy"), json.dumps(body).encode())
        for pause in (0.7, 0.2):
            await asyncio.sleep(pause)
            await ledger.kill()
            await ledger.start()
        answers = [json.loads(value) for value in await results.take(count)]
    finally:
        driver.serve = echo
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"n{i}" for i in range(count))
    for answer in answers:
        assert len(answer["text"]) == 1 + int(answer["custom_id"][1:]) % 7
    total = "SELECT sum(requests), sum(output_tokens) FROM billing WHERE tenant = 'sturdy'"
    want = f"{count}\t{sum(1 + i % 7 for i in range(count))}\n"
    await eventually(ledger, total, want)


async def test_a_standby_says_so_and_takes_over(
    kafka: str, ledger: LedgerProcess, driver: LedgerDriver, tmp_path: Path
) -> None:
    standby = LedgerProcess(kafka, LAYOUT, ledger.data_dir, slot=1)
    await standby.start(wait=False)
    try:
        text = ""
        async with asyncio.timeout(WAIT_S):
            while not (text := await standby.readiness()).startswith("standby"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert ledger.process is not None
        assert f"slot 0, pid {ledger.process.pid}, since 20" in text
        await ledger.kill()
        usage = make_usage(random.Random(5), "standby")
        await send_usage(driver, usage)
        await standby.ready()
        await eventually(standby, rows_of("standby"), expected_rows([usage]))
        assert await standby.stop() == 0
    finally:
        await standby.kill()
    await ledger.start()
    assert await ledger.sql(rows_of("standby")) == expected_rows([usage])


async def test_metrics_and_a_clean_end_even_with_a_slow_query(ledger: LedgerProcess) -> None:
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://127.0.0.1:{ledger.http_port}/metrics")).text
    for name in ("headrace_ledger_rows_total", "headrace_ledger_insert_seconds_count", "headrace_batch_open"):
        assert name in metrics
    slow = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
    running = asyncio.create_task(ledger.sql(slow, max_execution_time="9"))
    await asyncio.sleep(0.3)
    began = asyncio.get_running_loop().time()
    assert await ledger.stop() == 0
    assert asyncio.get_running_loop().time() - began < 6
    assert "Code: 236" in await running
    assert "Traceback" not in ledger.log_end()
