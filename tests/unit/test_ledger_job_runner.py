"""The jobs of a shard from files to files, with a store that may fail; the fleet is scripted."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest

from infra.chaos_run.small_disk import fill, small_disk
from schemas.fleet import FleetView
from schemas.object_store import open_store
from schemas.records import BatchCancel, BatchJob, BatchState, Tenant
from schemas.stored_files import Kind, ObjectPart, StoredFile, content, noted, object_parts, result_file_id
from streams.ledger import job_runner, job_store
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import Action, CancelRun, SendRequest
from streams.ledger.commits import JobCommit
from streams.ledger.job_runner import JobRunner
from streams.ledger.job_store import JobStore
from streams.ledger.metrics import REGISTRY
from tests.batch_world import END_MS, MODELS, completion, dispatched, rejected, tokens

HOUR = 3_600_000
FILE = "file-" + "0" * 32


def make_job(number: int = 0, tenant: str = "demo", window_ms: int = HOUR) -> BatchJob:
    now_ms = time.time_ns() // 1_000_000
    return BatchJob(f"batch_{number:032x}", tenant, "openai", FILE, "/v1/generate", None, window_ms, now_ms)


class Fleet:
    """Answers each request of a job at once, but those that `holds` says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, open_store(str(folder))
        self.committed: dict[str, BatchState] = {}
        self.requests: list[Any] = []
        self.holds = 1 << 30
        self.batch = BatchShard(0, 0, 1, end_ms=END_MS, position=0, now_ms=0)
        self._offset = 0
        tenants = {name: Tenant(name, 2, [], []) for name in ("demo", "other")}
        self.runner = JobRunner(
            0,
            7,
            JobStore(self.store),
            self.batch,
            MODELS,
            FleetView(),
            lambda: tenants,
            self._execute,
            self._commit,
        )

    async def put_input(self, count: int, tenant: str = "demo") -> None:
        line = {"method": "POST", "url": "/v1/generate"}
        body = {"model": "simulated", "prompt": "hi", "max_tokens": 2}
        data = b"".join(
            json.dumps({"custom_id": f"n{i}", **line, "body": body}).encode() + b"\n" for i in range(count)
        )
        name = content(tenant, FILE)
        file = StoredFile(
            id=FILE,
            tenant=tenant,
            filename="in",
            purpose="batch",
            bytes=len(data),
            created_at=0,
            expires_at=1 << 60,
            parts=[ObjectPart(name, len(data))],
        )
        await obstore.put_async(self.store, name, data)
        await obstore.put_async(self.store, noted(tenant, FILE), msgspec.json.encode(file))

    async def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendRequest(request):
                    self.requests.append(request)
                    if len(self.requests) <= self.holds:
                        self.say(dispatched(request), tokens(request, 0, "ab"), completion(request, 2))
                case CancelRun(record):
                    request = next(r for r in self.requests if r.request_id == record.request_id)
                    self.say(rejected(request, 499, "cancelled"))

    def answer_all(self) -> None:
        """Those that it holds."""
        self.holds = 1 << 30
        for request in self.requests:
            self.say(dispatched(request), tokens(request, 0, "ab"), completion(request, 2))

    def say(self, *records: Any) -> None:
        """A moment later, as the log would have it."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._say, records)

    def _say(self, records: tuple[Any, ...]) -> None:
        for record in records:
            self.batch.on_reply(record, self._offset, 0, time.time_ns() // 1_000_000, 0)
            self._offset += 1
        self.runner.wake()

    async def _commit(self, commit: JobCommit) -> None:
        self.batch.answers.release(commit.request_ids)
        await asyncio.sleep(0)
        self.committed[commit.state.batch_id] = commit.state

    async def until(self, *jobs: BatchJob, status: str = "") -> None:
        async with asyncio.timeout(30):
            while not all(self._is(job, status) for job in jobs):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def _is(self, job: BatchJob, status: str) -> bool:
        state = self.committed.get(job.batch_id)
        return state is not None and (state.status == status if status else state.ended_at is not None)

    def lines(self, job: BatchJob, kind: Kind) -> list[Any]:
        state = self.committed[job.batch_id]
        parts = object_parts(
            job.tenant, job.batch_id, kind, state.output if kind == "output" else state.error_output
        )
        data = b"".join((self.folder / part.name).read_bytes()[: part.size] for part in parts)
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(job_store, "MAX_RETRY_S", 0.2)


async def running(fleet: Fleet) -> "asyncio.Task[None]":
    return asyncio.create_task(fleet.runner.run())


def store_failures() -> float:
    count = REGISTRY.get_sample_value("headrace_batch_store_failures_total")
    assert count is not None
    return count


async def stop(task: "asyncio.Task[None]") -> None:
    """It must still run."""
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_jobs_of_two_tenants_end_with_each_line_once(fleet: Fleet) -> None:
    await fleet.put_input(1_500)
    await fleet.put_input(300, "other")
    jobs = [make_job(0), make_job(1), make_job(2, "other")]
    task = await running(fleet)
    for job in jobs:
        fleet.runner.on_job(job)
        fleet.runner.on_job(job)  # a gateway's second try
    await fleet.until(*jobs)
    await stop(task)
    for job, count in zip(jobs, (1_500, 1_500, 300), strict=True):
        state = fleet.committed[job.batch_id]
        assert (state.status, state.completed, state.output_tokens) == ("completed", count, 2 * count)
        names = Counter(line["custom_id"] for line in fleet.lines(job, "output"))
        assert names == Counter(f"n{i}" for i in range(count))
    assert len(fleet.requests) == 3_300
    assert fleet.batch.open == 0


@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_retries")
async def test_while_the_store_fails_little_is_kept_in_memory(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "MAX_UNWRITTEN_BYTES", 200 << 10)
    await fleet.put_input(1_000)
    (fleet.folder / "batches").write_bytes(b"")
    task, job = await running(fleet), make_job()
    fleet.runner.on_job(job)
    await fleet.until(job, status="in_progress")
    await asyncio.sleep(1.5)
    sent = len(fleet.requests)
    assert 0 < sent < 600
    assert fleet.committed[job.batch_id].completed == 0
    (fleet.folder / "batches").unlink()
    await fleet.until(job)
    await stop(task)
    assert len(fleet.requests) == len(fleet.lines(job, "output")) == 1_000


@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_retries")
async def test_a_full_disk_holds_a_job_up_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mib=8) as disk:
        if disk is None:
            pytest.skip("no tmpfs can be mounted here")
        fleet = Fleet(disk)
        await fleet.put_input(1_000)
        fleet.holds = 0
        task, job = await running(fleet), make_job()
        fleet.runner.on_job(job)
        await fleet.until(job, status="in_progress")
        fill(disk / "filler")
        failures = store_failures()
        fleet.answer_all()
        async with asyncio.timeout(30):
            while store_failures() < failures + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert fleet.committed[job.batch_id].completed == 0
        (disk / "filler").unlink()
        await fleet.until(job)
        await stop(task)
        assert len(fleet.requests) == len(fleet.lines(job, "output")) == 1_000
        # Of what could not be written whole nothing is left that would take the place of the rest.
        assert not [path for path in disk.rglob("*") if "#" in path.name]


@pytest.mark.asyncio
async def test_a_cancelled_and_an_expired_job_have_a_line_for_each_item(fleet: Fleet) -> None:
    fleet.holds = 10
    await fleet.put_input(2_500)
    await fleet.put_input(40, "other")
    task, job, late = await running(fleet), make_job(), make_job(1, "other", window_ms=700)
    fleet.runner.on_job(job)
    await fleet.until(job, status="in_progress")
    fleet.runner.on_job(late)
    fleet.runner.on_job(BatchCancel(job.batch_id, job.tenant, 0))
    await fleet.until(job, late)
    await stop(task)
    state = fleet.committed[job.batch_id]
    assert (state.status, state.completed + state.cancelled) == ("cancelled", 2_500)
    assert state.completed <= 10
    assert len(fleet.requests) < 2_500
    names = Counter(line["custom_id"] for line in fleet.lines(job, "output") + fleet.lines(job, "error"))
    assert names == Counter(f"n{i}" for i in range(2_500))
    state = fleet.committed[late.batch_id]
    assert (state.status, state.completed + state.expired) == ("expired", 40)


@pytest.mark.asyncio
async def test_what_a_dead_life_left_goes_on_from_its_state(fleet: Fleet) -> None:
    fleet.holds = 700
    await fleet.put_input(1_000)
    task, job = await running(fleet), make_job()
    fleet.runner.on_job(job)
    async with asyncio.timeout(20):
        while (state := fleet.committed.get(job.batch_id)) is None or state.completed < 700:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await stop(task)
    second = Fleet(fleet.folder)
    second.runner.on_state(state)
    second.runner.on_job(job)
    task = await running(second)
    await second.until(job)
    await stop(task)
    assert len(second.requests) == 300
    assert second.committed[job.batch_id].completed == 1_000
    names = Counter(line["custom_id"] for line in second.lines(job, "output"))
    assert names == Counter(f"n{i}" for i in range(1_000))


@pytest.mark.asyncio
async def test_what_died_before_its_files_were_noted_notes_them(fleet: Fleet) -> None:
    await fleet.put_input(20)
    task, job = await running(fleet), make_job()
    fleet.runner.on_job(job)
    await fleet.until(job)
    await stop(task)
    state = fleet.committed[job.batch_id]
    note = fleet.folder / noted("demo", result_file_id(job.batch_id, "output"))
    assert msgspec.json.decode(note.read_bytes(), type=StoredFile).lines == 20
    note.unlink()
    # As it was before the last commit; the input is gone by now.
    (fleet.folder / noted("demo", FILE)).unlink()
    second = Fleet(fleet.folder)
    second.runner.on_state(replace(state, status="finalizing", ended_at=None))
    second.runner.on_job(job)
    task = await running(second)
    await second.until(job)
    await stop(task)
    assert second.committed[job.batch_id].status == "completed"
    assert msgspec.json.decode(note.read_bytes(), type=StoredFile).lines == 20
    assert not second.requests


@pytest.mark.asyncio
async def test_a_job_that_was_being_cancelled_sends_nothing_more(fleet: Fleet) -> None:
    fleet.holds = 5
    await fleet.put_input(200)
    task, job = await running(fleet), make_job()
    fleet.runner.on_job(job)
    await fleet.until(job, status="in_progress")
    await stop(task)
    second = Fleet(fleet.folder)
    second.runner.on_state(replace(fleet.committed[job.batch_id], status="cancelling"))
    second.runner.on_job(job)
    task = await running(second)
    await second.until(job)
    await stop(task)
    state = second.committed[job.batch_id]
    assert (state.status, state.completed + state.cancelled) == ("cancelled", 200)
    assert not second.requests
