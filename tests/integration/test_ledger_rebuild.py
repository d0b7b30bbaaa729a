"""`headrace ledger verify` and `rebuild` over the seam of archive and topic, with a ledger that bills."""

import asyncio
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import chdb
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from schemas import topics
from schemas.codec import encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.object_store import open_store
from schemas.records import Usage
from schemas.topics import DAY_MS, Layout
from streams.ledger.archiver import Archiver
from streams.ledger.billing import billed, row_of
from streams.ledger.usage_source import TopicReader, UsageArchive
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
# Within what headrace.usage_rows keeps.
BEGAN = int(time.time() * 1_000) - 6 * DAY_MS
WAIT_S = 120.0
CLI_S = 240.0


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rebuild-objects")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(
    kafka: str, objects: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LedgerProcess]:
    data_dir = tmp_path_factory.mktemp("rebuild") / "data"
    ledger = LedgerProcess(kafka, LAYOUT, data_dir, HEADRACE_OBJECT_STORE=str(objects))
    await ledger.start()
    yield ledger
    await ledger.kill()


async def send(kafka: str, usages: list[Usage]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS) as producer:
        for usage in usages:
            place = topics.tenant_partition(usage.tenant, usage.priority, LAYOUT.shards)
            await producer.send(topics.USAGE, encode(usage), partition=place)
        await producer.send(topics.USAGE, b"garbage", partition=0)
        await producer.flush()


async def archive(kafka: str, objects: Path) -> None:
    """All that is there, as if its day were over."""

    async def nothing_new() -> None: ...

    async with AIOKafkaConsumer(bootstrap_servers=kafka, **CONSUMER_SETTINGS) as consumer:
        reader = TopicReader(consumer, TopicPartition, topics.USAGE)
        archiver = Archiver(UsageArchive(open_store(str(objects))), reader, nothing_new, records_a_part=20)
        for partition in range(LAYOUT.shards * topics.NUM_CLASSES):
            assert await archiver.archive(partition, 10**13 // DAY_MS * DAY_MS) is None


async def age_out(kafka: str, share: float) -> None:
    async with AIOKafkaConsumer(bootstrap_servers=kafka, **CONSUMER_SETTINGS) as consumer:
        places = [TopicPartition(topics.USAGE, n) for n in range(LAYOUT.shards * topics.NUM_CLASSES)]
        ends = await consumer.end_offsets(places)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    await admin.delete_records({tp: RecordsToDelete(int(end * share)) for tp, end in ends.items()})
    await admin.close()


async def headrace_ledger(kafka: str, objects: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, what it printed)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.cli", "ledger", *arguments, "--kafka", kafka,
        "--object-store", str(objects),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(CLI_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode()


def make_usages(seed: int, count: int) -> list[Usage]:
    """Of two tenants over some days: retries in any order, sealed rows, records that came twice."""
    rng = random.Random(seed)
    found: list[Usage] = []
    for _ in range(count):
        request_id, tenant, priority = rng.randbytes(16), rng.choice(["acme", "cheap"]), rng.randrange(3)
        began, tokens = BEGAN + rng.randrange(5 * DAY_MS), rng.randrange(1000)
        found += [
            Usage(
                request_id, attempt, sealed, tenant, priority, "m", tokens, tokens // 2, rng.randrange(500),
                "stop", began, began + 1, 0, 1,
            )
            for attempt in range(1, rng.choice([2, 2, 2, 3]))
            for sealed in rng.choice([[False], [False, True]])
        ]  # fmt: skip
    found += rng.choices(found, k=count // 4)
    rng.shuffle(found)
    return found


VERSIONS = "SELECT tenant, request_id, version FROM {} FINAL ORDER BY 1, 2, 3"
ROWS = "SELECT tenant, request_id, attempt, sealed, output_tokens FROM {} FINAL ORDER BY 1, 2"


def expected(usages: list[Usage]) -> str:
    rows = sorted(billed(map(row_of, usages)).items())
    return "".join(
        f"{tenant}\t{request_id}\t{row.attempt}\t{str(row.sealed).lower()}\t{row.output_tokens}\n"
        for (tenant, request_id), row in rows
    )


def expected_versions(usages: list[Usage]) -> str:
    rows = sorted({(row.tenant, row.request_id, row.version) for row in map(row_of, usages)})
    return "".join(f"{tenant}\t{request_id}\t{version}\n" for tenant, request_id, version in rows)


async def eventually(ledger: LedgerProcess, want: str) -> None:
    got = ""
    try:
        async with asyncio.timeout(WAIT_S):
            while (got := await ledger.sql(ROWS.format("usage"))) != want:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    except TimeoutError:
        assert got == want, ledger.log_end()


async def test_over_the_seam(kafka: str, objects: Path, ledger: LedgerProcess) -> None:
    # In the archive alone, in both, in the topic alone: of some requests the rows lie on both sides.
    usages = make_usages(1, 60)
    third = len(usages) // 3
    await send(kafka, usages[: 2 * third])
    await eventually(ledger, expected(usages[: 2 * third]))
    await archive(kafka, objects)
    await age_out(kafka, 0.5)
    await send(kafka, usages[2 * third :])
    want = expected(usages)
    await eventually(ledger, want)
    url, folder = f"http://127.0.0.1:{ledger.sql_port}", f"chdb://{ledger.data_dir / 'clickhouse'}"

    # 1. The ledger bills: its table is right, and a rebuild says who is in its way.
    status, text = await headrace_ledger(kafka, objects, "verify", "--clickhouse", url)
    assert (status, text.splitlines()[-1]) == (0, "the table is what the log says"), text
    assert text.splitlines()[0] == f"{len(usages) + 2} records of usage read"
    assert ledger.process is not None
    status, text = await headrace_ledger(kafka, objects, "rebuild", "--clickhouse", folder, "--swap")
    assert status == 1
    assert f"held by the ledger of slot 0, pid {ledger.process.pid}: stop it" in text

    # 2. A row is lost, one doubled under another name, one changed, one replaced by a lower version.
    assert await ledger.stop() == 0
    ids = [row.split("\t")[1] for row in want.splitlines()]
    (lost, changed, lowered), extra = random.Random(2).sample(ids, 3), "f" * 32
    damage(ledger.data_dir / "clickhouse", lost, changed, lowered, extra)
    named = {lost: "lost", changed: "another row", lowered: "another row", extra: "not in the log"}
    status, text = await headrace_ledger(kafka, objects, "verify", "--clickhouse", folder)
    assert (status, dict(re.findall(r"request (\w+): ([a-z ]+):", text))) == (1, named), text
    assert re.search(r"acme 20\d\d-\d\d-\d\d: \d+ rows, \d+/\d+/\d+ tokens in the table, ", text)

    # 3. The new table takes its place, and the ledger goes on with what was sent while it was away.
    more = make_usages(3, 10)
    await send(kafka, more)
    status, text = await headrace_ledger(kafka, objects, "rebuild", "--clickhouse", folder, "--swap")
    assert (status, set(re.findall(r"request (\w+):", text))) == (0, set(named)), text
    assert "the old table is headrace.usage_replaced" in text
    await ledger.start()
    await eventually(ledger, expected(usages + more))
    assert extra in await ledger.sql(ROWS.format("usage_replaced"))
    assert await ledger.sql(VERSIONS.format("usage_rows")) == expected_versions(usages + more)
    assert lost not in await ledger.sql(VERSIONS.format("usage_rows_replaced"))
    assert "_rebuilt" not in await ledger.sql("SHOW TABLES")
    assert (await ledger.sql("SELECT sum(requests) FROM billing")) == f"{len(ids) + 10}\n"

    # 4. Usage that is in neither is told of, and keeps a swap from losing what the old table has.
    await age_out(kafka, 1.0)
    status, text = await headrace_ledger(kafka, objects, "verify", "--clickhouse", url)
    assert status == 1
    assert re.search(r"missing in the log: partition \d, offsets \d+ to \d+", text)
    assert await ledger.stop() == 0
    status, text = await headrace_ledger(kafka, objects, "rebuild", "--clickhouse", folder, "--swap")
    assert status == 1
    assert "not swapped: usage is missing in the log" in text


def damage(folder: Path, lost: str, changed: str, lowered: str, extra: str) -> None:
    """By the engine itself, as nothing of ours would."""
    handle = chdb.connect(str(folder))
    try:
        handle.query(
            f"INSERT INTO headrace.usage SELECT * REPLACE ('{extra}' AS request_id) "
            f"FROM (SELECT * FROM headrace.usage FINAL WHERE request_id = '{changed}')"
        )
        for request_id, field in (
            (changed, "input_tokens + 1 AS input_tokens"),
            (lowered, "0 AS output_tokens"),
        ):
            handle.query(
                "CREATE TABLE headrace.kept ENGINE = Memory AS SELECT * REPLACE "
                f"({field}) FROM headrace.usage FINAL WHERE request_id = '{request_id}'"
            )
            handle.query(f"DELETE FROM headrace.usage WHERE request_id = '{request_id}'")
            handle.query("INSERT INTO headrace.usage SELECT * FROM headrace.kept")
            handle.query("DROP TABLE headrace.kept SYNC")
        for table in ("usage", "usage_rows"):
            handle.query(f"DELETE FROM headrace.{table} WHERE request_id = '{lost}'")
    finally:
        handle.close()
