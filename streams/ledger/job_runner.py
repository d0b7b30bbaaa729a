"""The jobs of one shard at work: checked, fed to the shard's owner, written, ended.

    waiting ──turn──► check_lines ─► window ─► feed ─► BatchShard ─► answers ─► parts, then state ─► files
    noted

Decisions are those of job.py, job_feeding.py and batch.py. What this raises ends the shard, which begins
anew from the states that are committed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from schemas.api.batches import ENDED
from schemas.api.errors import ApiError
from schemas.clock import epoch_ms
from schemas.fleet import FleetView
from schemas.models import LoadedModel
from schemas.records import BatchCancel, BatchJob, BatchState, Tenant
from schemas.stored_files import KEPT_MS, Kind, StoredFile, object_parts, result_file_id
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import Action, FileAnswer
from streams.ledger.batch_item import BatchItem, FileSource
from streams.ledger.batch_offsets import admission_offsets
from streams.ledger.batch_outcome import CANCELLED, EXPIRED
from streams.ledger.commits import JobCommit
from streams.ledger.file_lines import error_line
from streams.ledger.job import FileJob, Status
from streams.ledger.job_feeding import (
    MAX_UNWRITTEN_BYTES,
    Feeder,
    Unserved,
    next_to_run,
    queued_tokens,
)
from streams.ledger.job_lines import BadLine
from streams.ledger.job_store import JobStore
from streams.ledger.job_window import WINDOW_LINES, JobInput, check_lines
from streams.ledger.job_writer import JobWriter, LiveJob
from streams.ledger.metrics import BATCH_JOBS
from streams.ledger.source_reader import wait_for

log = logging.getLogger(__name__)

# Each has a window and its results' last parts in memory: some 20 MB with prompts of 1,000 tokens.
MAX_RUNNING = 8
# Those that only have to end wait for no turn.
MAX_ENDING = 4
CHECKS_AT_ONCE = 2
_IDLE_S = 0.1
_FED_AT_ONCE = 64
_KINDS: tuple[Kind, ...] = ("output", "error")


class JobRunner:
    def __init__(
        self,
        shard: int,
        part_epoch: int,
        store: JobStore,
        batch: BatchShard,
        models: Mapping[str, LoadedModel],
        fleet: FleetView,
        tenants: Callable[[], dict[str, Tenant]],
        execute: Callable[[Iterable[Action]], Awaitable[None]],
        commit: Callable[[JobCommit], Awaitable[None]],
        *,
        prefix_order: bool = True,
    ) -> None:
        """`part_epoch`: no other life of the shard has it. `commit` returns when the state is committed."""
        self._shard, self._epoch, self._store, self._batch = shard, part_epoch, store, batch
        self._models, self._fleet, self._tenants = models, fleet, tenants
        self._execute, self._commit, self._prefix_order = execute, commit, prefix_order
        self._known: set[str] = set()
        self._states: dict[str, BatchState] = {}
        self._cancelled: set[str] = set()
        self._waiting: dict[str, FileJob] = {}
        self._running: dict[str, LiveJob] = {}
        self._feeder = Feeder()
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._moved = asyncio.Event()
        self._writer = JobWriter(batch, store, part_epoch, self._running, commit, self._moved.set)

    def on_state(self, state: BatchState) -> None:
        """Of an earlier life; all of them come before the first job."""
        self._states[state.batch_id] = state

    def on_job(self, record: BatchJob | BatchCancel) -> None:
        if isinstance(record, BatchCancel):
            if record.batch_id in self._waiting or record.batch_id in self._running:
                self._cancelled.add(record.batch_id)
        elif record.batch_id not in self._known:
            self._known.add(record.batch_id)
            state = self._states.pop(record.batch_id, None)
            if state is None or state.status not in ENDED:
                self._waiting[record.batch_id] = FileJob(record, state, self._epoch)
        self._moved.set()

    def wake(self) -> None:
        """Something may have been answered."""
        answers = self._batch.answers
        if answers.file:
            self._writer.due.set()
        if answers.ended:
            for batch_id, count in answers.ended.items():
                if (running := self._running.get(batch_id)) is not None:
                    running.sent -= count
            answers.ended.clear()
            self._moved.set()

    async def run(self) -> None:
        """Until cancelled. Jobs of earlier lives are told before."""
        self._states.clear()  # of jobs that were deleted
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._feed())
                group.create_task(self._writer.run())
                while True:
                    self._take_turns(group)
                    for running in self._running.values():
                        if self._must_stop(running):
                            group.create_task(self._stop(running))
                    BATCH_JOBS.labels(str(self._shard)).set(len(self._waiting) + len(self._running))
                    await asyncio.sleep(_IDLE_S)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            BATCH_JOBS.labels(str(self._shard)).set(0)

    def _take_turns(self, group: asyncio.TaskGroup) -> None:
        now_ms = epoch_ms()
        while self._waiting and len(self._running) < MAX_RUNNING + MAX_ENDING:
            running = [each.job for each in self._running.values()]
            ending = [j for j in self._waiting.values() if self._why_stopped(j, now_ms) is not None]
            job = next_to_run(ending if len(running) >= MAX_RUNNING else self._waiting.values(), running)
            if job is None:
                return
            del self._waiting[job.batch_id]
            mine = self._running[job.batch_id] = LiveJob(job)
            group.create_task(self._run_job(mine), name=job.batch_id)

    def _why_stopped(self, job: FileJob, now_ms: int) -> ApiError | None:
        if job.status is Status.CANCELLING or job.batch_id in self._cancelled:
            return CANCELLED
        return EXPIRED if now_ms >= job.expires_at else None

    def _must_stop(self, running: LiveJob) -> bool:
        """It was cancelled, or has no time left, and is not told yet."""
        job = running.job
        if running.stopped is not None or job.status not in (Status.IN_PROGRESS, Status.CANCELLING):
            return False
        running.stopped = self._why_stopped(job, epoch_ms())
        return running.stopped is not None

    async def _stop(self, running: LiveJob) -> None:
        job, error, now_ms = running.job, running.stopped, epoch_ms()
        assert error is not None
        log.info("job stopped", extra={"batch_id": job.batch_id, "reason": error.code})
        self._moved.set()
        if error is CANCELLED and job.status is Status.IN_PROGRESS:
            job.transition_to(Status.CANCELLING, now_ms)
        await self._execute(self._batch.cancel(job.batch_id, error, now_ms))
        self.wake()
        await self._writer.write(running, [])

    # One job

    async def _run_job(self, running: LiveJob) -> None:
        job = running.job
        if job.status is Status.VALIDATING:
            await self._check(job)
        if self._must_stop(running):
            await self._stop(running)
        if job.status in (Status.IN_PROGRESS, Status.CANCELLING):
            await self._read(running)
        if job.status not in ENDED:
            await self._end(running)
        del self._running[job.batch_id]
        self._cancelled.discard(job.batch_id)
        log.info("job ended", extra={"batch_id": job.batch_id, "status": job.status, "lines": job.total})

    async def _check(self, job: FileJob) -> None:
        async with self._checks:
            total, errors = await check_lines(self._store, job.asked)
        if errors:
            job.fail(errors, epoch_ms())
        else:
            job.validated(total, epoch_ms())
        await self._commit(JobCommit(job.state()))

    async def _read(self, running: LiveJob) -> None:
        """Returns when all lines have ended and are written, or no more can be read."""
        job = running.job
        source = JobInput(self._store, job, self._models, self._prefix_order)
        while not job.read_out and source.error is None:
            if len(running.window) > WINDOW_LINES // 4 or self._writer.unwritten >= MAX_UNWRITTEN_BYTES:
                await self._wait(running)
                continue
            rules = self._tenants().get(job.tenant)
            recovery = self._batch.recovery
            lines = await source.next(rules, running.stopped, recovery.has_any)
            # What an earlier life sent goes on whatever else waits.
            begun = {line.request_id for line in lines if recovery.has_any(line.request_ids())}
            await self._send(running, [line for line in lines if line.request_id in begun])
            running.window[:0] = [line for line in lines if line.request_id not in begun]
            self._moved.set()
        while job.open:
            await self._wait(running)
        if source.error is not None:
            job.fail([source.error], epoch_ms())

    async def _end(self, running: LiveJob) -> None:
        job = running.job
        # 1. All lines are in the parts and counted. From here on a successor only does this again.
        if job.status is Status.IN_PROGRESS:
            job.transition_to(Status.FINALIZING, epoch_ms())
        await self._writer.write(running, [])
        # 2. The files are there.
        state = job.state()
        for kind, parts in zip(_KINDS, (state.output, state.error_output), strict=True):
            if parts:
                now_ms, objects = epoch_ms(), object_parts(job.tenant, job.batch_id, kind, parts)
                await self._store.note(
                    StoredFile(
                        id=result_file_id(job.batch_id, kind),
                        tenant=job.tenant,
                        filename=f"{job.batch_id}_{kind}.jsonl",
                        purpose="batch_output",
                        bytes=sum(part.size for part in parts),
                        created_at=now_ms,
                        expires_at=now_ms + (job.asked.output_expires_ms or KEPT_MS),
                        parts=objects,
                        lines=job.lines(kind),
                    )
                )
        # 3. And it says so.
        job.finish(epoch_ms())
        await self._writer.write(running, [])

    async def _wait(self, running: LiveJob) -> None:
        running.changed.clear()
        await wait_for(running.changed, _IDLE_S)

    # All jobs

    async def _feed(self) -> None:
        while True:
            self._moved.clear()
            if not await self._feed_some():
                await wait_for(self._moved, _IDLE_S)
            await asyncio.sleep(0)

    async def _feed_some(self) -> bool:
        tenants, now_ms = self._tenants(), epoch_ms()
        # The tenants of a shard are those whose requests hash to it: both partitions have the same number.
        partition = self._batch.reply_partition
        said, told = admission_offsets(self._fleet).get(partition), queued_tokens(self._fleet, partition)
        unserved = Unserved.of(self._batch.requests(), said, told)
        count = 0
        while count < _FED_AT_ONCE and self._writer.unwritten < MAX_UNWRITTEN_BYTES:
            running = self._feeder.choose(
                self._running.values(), tenants, self._batch.refused_until, unserved.is_full, now_ms
            )
            if running is None:
                break
            rules = tenants.get(running.job.tenant)
            line = self._feeder.take(running, 1.0 if rules is None else rules.weight)
            if len(running.window) == WINDOW_LINES // 4:
                running.changed.set()
            if isinstance(line, BatchItem):
                unserved.add(line)
            await self._send(running, [line])
            count += 1
        return count > 0

    async def _send(self, running: LiveJob, lines: Iterable[BatchItem | BadLine]) -> None:
        answers, recovery = self._batch.answers, self._batch.recovery
        for line in lines:
            stopped = running.stopped if not recovery.has_any(line.request_ids()) else None
            if isinstance(line, BatchItem) and stopped is None:
                running.sent += line.num_requests
                now_ms = epoch_ms()
                await self._execute(self._batch.accept(line, now_ms, self._fleet.clock.now_ms))
                if running.stopped is not None:
                    await self._execute(self._batch.cancel(running.job.batch_id, running.stopped, now_ms))
                continue
            error, source = line.error if isinstance(line, BadLine) else stopped, line.source
            assert error is not None
            assert isinstance(source, FileSource)
            answers.add_line(
                FileAnswer(
                    source, line.request_id, error_line(source.custom_id, line.request_id, error), error.code
                )
            )
        self.wake()
