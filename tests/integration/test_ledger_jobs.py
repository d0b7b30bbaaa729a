"""Batches of files through the ledger's process: real Kafka, a real folder; admission and the worker are
scripted."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from schemas import topics
from schemas.records import BatchState, InferenceRequest, Tenant
from schemas.topics import Layout
from streams.ledger.file_lines import item_request_id
from tests.job_driver import JobDriver, make_line
from tests.ledger_driver import LedgerDriver, echo
from tests.ledger_process import LedgerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ledger(
    kafka: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LedgerProcess]:
    data_dir = tmp_path_factory.mktemp("ledger") / "data"
    ledger = LedgerProcess(kafka, LAYOUT, data_dir, HEADRACE_OBJECT_STORE=str(folder))
    await ledger.start()
    yield ledger
    assert await ledger.stop() == 0
    assert "Traceback" not in ledger.log_end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(kafka: str, ledger: LedgerProcess) -> AsyncIterator[LedgerDriver]:
    async with LedgerDriver(kafka, LAYOUT, echo) as driver:
        yield driver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def jobs(kafka: str, folder: Path, driver: LedgerDriver) -> JobDriver:
    jobs = JobDriver(kafka, folder, driver)
    await jobs.start()
    return jobs


async def make_tenant(driver: LedgerDriver, name: str) -> str:
    await driver.put_tenant(Tenant(name, 2, [], []))
    return name


def each_once(jobs: JobDriver, state: BatchState, names: list[str]) -> dict[str, Any]:
    """Every custom_id has one line, in one of the files, and the counts are those of the lines."""
    output, errors = jobs.lines(state, "output"), jobs.lines(state, "error")
    assert Counter(line["custom_id"] for line in output + errors) == Counter(names)
    assert state.total == len(names)
    assert (state.completed, state.failed + state.expired + state.cancelled) == (len(output), len(errors))
    for kind, lines in (("output", output), ("error", errors)):
        file = jobs.file(state, kind)  # type: ignore[arg-type]
        assert (file.lines if file else 0) == len(lines)
    return {line["custom_id"]: line for line in output + errors}


async def bill(ledger: LedgerProcess, tenant: str, want: str) -> None:
    query = f"SELECT sum(requests), sum(output_tokens) FROM billing WHERE tenant = '{tenant}'"
    async with asyncio.timeout(20):
        while await ledger.sql(query) != want:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_job_from_its_file_to_its_files(
    ledger: LedgerProcess, driver: LedgerDriver, jobs: JobDriver
) -> None:
    tenant = await make_tenant(driver, "whole")
    lines = [make_line(f"n{i}", max_tokens=1 + i % 5) for i in range(40)]
    lines[7] = make_line("n7", temperature=9)
    batch_id = await jobs.run_job(tenant, lines)
    state = await jobs.wait_for(batch_id)
    assert (state.status, state.completed, state.failed) == ("completed", 39, 1)
    by_name = each_once(jobs, state, [f"n{i}" for i in range(40)])
    assert by_name["n4"]["response"]["body"]["text"] == "abcde"
    assert by_name["n7"]["response"]["status_code"] == 400
    assert by_name["n7"]["response"]["body"]["error"]["param"] == "temperature"
    said = [s.status for s in jobs.states[batch_id]]
    assert [s for i, s in enumerate(said) if said[:i].count(s) == 0] == [
        "in_progress", "finalizing", "completed",
    ]  # fmt: skip
    ran = [request for request in driver.requests if request.tenant == tenant]
    assert (state.input_tokens, state.output_tokens) == (3 * 39, sum(r.sampling.max_tokens for r in ran))
    assert {r.end_ms for r in ran} == {topics.DAY_MS}
    await bill(ledger, tenant, f"39\t{state.output_tokens}\n")


async def test_a_file_that_is_wrong_fails_with_line_numbers(driver: LedgerDriver, jobs: JobDriver) -> None:
    tenant = await make_tenant(driver, "wrong")
    lines = [make_line("a"), b"{no\n", b"\n", make_line("a"), make_line("b", "/v1/completions", prompt="x")]
    state = await jobs.wait_for(await jobs.run_job(tenant, lines))
    assert state.status == "failed"
    assert [(e.code, e.line, e.param) for e in state.errors] == [
        ("invalid_json", 2, None),
        ("duplicate_custom_id", 4, "custom_id"),
        ("invalid_value", 5, "url"),
    ]
    empty = await jobs.wait_for(await jobs.run_job(tenant, [b"\n"]))
    assert [(e.code, e.line) for e in empty.errors] == [("empty_file", None)]
    gone = await jobs.wait_for(await jobs.start_job(tenant, "file-" + "0" * 32))
    assert [e.code for e in gone.errors] == ["input_file_not_found"]
    assert not [request for request in driver.requests if request.tenant == tenant]


async def test_cancel_ends_what_runs_and_what_waits(driver: LedgerDriver, jobs: JobDriver) -> None:
    tenant = await make_tenant(driver, "stopped")
    count = 1_500

    seen: list[InferenceRequest] = []

    async def some(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        seen.append(request)
        if len(seen) <= 20:
            await echo(driver, request, offset)
        else:
            await driver.dispatched(request)
            await driver.tokens(request, 0, [97])

    driver.serve = some
    try:
        batch_id = await jobs.run_job(tenant, [make_line(f"n{i}") for i in range(count)])
        await jobs.wait_for(batch_id, "in_progress", completed=20)
        await jobs.cancel(tenant, batch_id)
        async with asyncio.timeout(20):
            while len(driver.cancellations) < len(seen) - 20:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for request in seen[20:]:
            await driver.complete(request, 1, "cancelled")
        state = await jobs.wait_for(batch_id)
    finally:
        driver.serve = echo
    assert (state.status, state.completed, state.cancelled) == ("cancelled", 20, count - 20)
    by_name = each_once(jobs, state, [f"n{i}" for i in range(count)])
    assert Counter(line["error"] and line["error"]["code"] for line in by_name.values()) == {
        None: 20,
        "batch_cancelled": count - 20,
    }
    assert 20 < len(seen) < count
    assert state.output_tokens == 20 * 3 + len(seen) - 20


async def test_expiry_delivers_what_is_done(driver: LedgerDriver, jobs: JobDriver) -> None:
    tenant = await make_tenant(driver, "late")

    async def half(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        if request.sampling.max_tokens == 1:
            await echo(driver, request, offset)
        else:
            await asyncio.sleep(4)
            await driver.reject(request, 499, "cancelled", 0)

    driver.serve = half
    try:
        lines = [make_line(f"n{i}", max_tokens=1 + i % 2) for i in range(10)]
        batch_id = await jobs.run_job(tenant, lines, completion_window_ms=3_000)
        await jobs.wait_for(batch_id, "in_progress", completed=5)
        state = await jobs.wait_for(batch_id)
    finally:
        driver.serve = echo
    assert (state.status, state.completed, state.expired) == ("expired", 5, 5)
    by_name = each_once(jobs, state, [f"n{i}" for i in range(10)])
    assert by_name["n1"]["error"]["code"] == "batch_expired"


async def test_kill_9_at_any_time_leaves_each_line_once(
    ledger: LedgerProcess, driver: LedgerDriver, jobs: JobDriver
) -> None:
    tenant = await make_tenant(driver, "killed")
    rng = random.Random(7)
    count = 400

    async def slow(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        await asyncio.sleep(rng.random() * 3)
        await echo(driver, request, offset)

    driver.serve = slow
    try:
        names = [f"n{i}" for i in range(count)]
        lines = [make_line(n, max_tokens=1 + i % 7) for i, n in enumerate(names)]
        batch_id = await jobs.run_job(tenant, lines)
        for pause in (0.3, 1.6, 1.1):
            await asyncio.sleep(pause)
            await ledger.kill()
            await ledger.start()
        state = await jobs.wait_for(batch_id, seconds=60)
    finally:
        driver.serve = echo
    assert (state.status, state.completed) == ("completed", count)
    by_name = each_once(jobs, state, names)
    tokens = 0
    for i, name in enumerate(names):
        assert by_name[name]["response"]["body"]["usage"]["output_tokens"] == 1 + i % 7
        tokens += 1 + i % 7
    assert state.output_tokens == tokens
    await bill(ledger, tenant, f"{count}\t{tokens}\n")


async def test_an_input_that_goes_away_fails_the_job_and_delivers_what_is_done(
    ledger: LedgerProcess, driver: LedgerDriver, jobs: JobDriver
) -> None:
    tenant = await make_tenant(driver, "gone")
    held: list[tuple[InferenceRequest, int]] = []

    async def hold(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        held.append((request, offset))
        if len(held) <= 10:
            await echo(driver, request, offset)

    driver.serve = hold
    try:
        # More than is read ahead.
        names = [f"n{i}" for i in range(6_000)]
        file_id = await jobs.put_file(tenant, [make_line(n, prompt="x" * 500) for n in names])
        batch_id = await jobs.start_job(tenant, file_id)
        await jobs.wait_for(batch_id, "in_progress", completed=10)
        jobs.delete_input(tenant, file_id)
        driver.serve = echo
        for request, offset in held[10:]:
            await echo(driver, request, offset)
        state = await jobs.wait_for(batch_id)
    finally:
        driver.serve = echo
    assert state.status == "failed"
    assert [e.code for e in state.errors] == ["input_file_not_found"]
    assert 10 < state.completed < 6_000
    assert len(jobs.lines(state, "output")) == state.completed
    assert jobs.file(state, "output") is not None


async def test_lines_of_our_own_form(driver: LedgerDriver, jobs: JobDriver) -> None:
    tenant = await make_tenant(driver, "own")
    lines = [
        json.dumps({"custom_id": "bare", "prompt": "hi", "max_tokens": 2}).encode() + b"\n",
        make_line("line", "/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=2),
        json.dumps({"custom_id": "named", "model": "gpt-9", "prompt": "hi"}).encode(),
    ]
    batch_id = await jobs.run_job(tenant, lines, form="headrace", endpoint=None, model="simulated")
    state = await jobs.wait_for(batch_id)
    by_name = each_once(jobs, state, ["bare", "line", "named"])
    assert by_name["bare"]["response"]["body"]["text"] == "ab"
    assert by_name["line"]["response"]["body"]["type"] == "message"
    assert by_name["named"]["response"]["status_code"] == 404


async def test_while_results_cannot_be_written_the_job_waits_and_then_goes_on(
    folder: Path, driver: LedgerDriver, jobs: JobDriver
) -> None:
    tenant = await make_tenant(driver, "away")
    names = [f"n{i}" for i in range(1_500)]
    # A file where the folder of the tenant's batches would be: every write fails.
    in_the_way = folder / "batches" / tenant
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_bytes(b"")
    batch_id = await jobs.run_job(tenant, [make_line(name) for name in names])
    state = await jobs.wait_for(batch_id, "in_progress")
    await asyncio.sleep(4)
    assert any(request.tenant == tenant for request in driver.requests)
    assert jobs.states[batch_id][-1].completed == 0
    # Others are served meanwhile, but for what is in the same flush.
    in_the_way.unlink()
    state = await jobs.wait_for(batch_id, seconds=60)
    assert (state.status, state.completed) == ("completed", len(names))
    each_once(jobs, state, names)
    assert len([request for request in driver.requests if request.tenant == tenant]) == len(names)


async def test_kill_9_between_the_choices_of_a_line(
    ledger: LedgerProcess, driver: LedgerDriver, jobs: JobDriver
) -> None:
    tenant = await make_tenant(driver, "choices")
    named, late = asyncio.Event(), asyncio.Event()

    async def first_ones_first(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
        # Each line's first choice ends at once, the others in the ledger's next life.
        await named.wait()
        if request.request_id not in firsts:
            await late.wait()
        await echo(driver, request, offset)

    names = [f"n{i}" for i in range(20)]
    messages = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": "simulated", "messages": messages, "max_tokens": 3, "n": 3, "seed": 5}
    lines = [make_line(name, "/v1/chat/completions", **asked) for name in names]
    firsts: set[bytes] = set()
    driver.serve = first_ones_first
    try:
        batch_id = await jobs.run_job(tenant, lines, endpoint="/v1/chat/completions")
        firsts |= {item_request_id(batch_id, i) for i in range(len(names))}
        named.set()
        await asyncio.sleep(2.5)
        await ledger.kill()
        await ledger.start()
        late.set()
        state = await jobs.wait_for(batch_id, seconds=60)
    finally:
        driver.serve = echo
    assert (state.status, state.total, state.completed) == ("completed", len(names), len(names))
    by_name = each_once(jobs, state, names)
    for name in names:
        body = by_name[name]["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in body["choices"]] == ["abc"] * 3
        assert body["usage"]["completion_tokens"] == 9
    ran = [request for request in driver.requests if request.tenant == tenant]
    assert len({request.request_id for request in ran}) == 60
    counted = Counter(request.request_id for request in ran)
    assert [counted[first] for first in firsts] == [1] * len(names)
    assert len({request.sampling.seed for request in ran}) == 3
    await bill(ledger, tenant, f"60\t{3 * 60}\n")
