"""Writes what a shard's jobs answered: parts first, then the states that speak of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from schemas.stored_files import part_name
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import FileAnswer
from streams.ledger.commits import JobCommit
from streams.ledger.job_feeding import RunningJob
from streams.ledger.job_store import JobStore
from streams.ledger.metrics import BATCH_FINISHED

# A flush writes the last part of each job again: not with each transaction of answers to topics.
FLUSH_S, FLUSH_BYTES = 1.0, 1 << 20
MAX_BUFFERED_BYTES = 16 << 20
_LOOK_S = 0.05


@dataclass(slots=True)
class LiveJob(RunningJob):
    """`changed`: some of it ended and is committed, or its window is nearly empty. `writing`: states of
    one job are told in order."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class JobWriter:
    """`due` is set by who adds answers of files."""

    def __init__(
        self,
        batch: BatchShard,
        store: JobStore,
        part_epoch: int,
        running: Mapping[str, LiveJob],
        commit: Callable[[JobCommit], Awaitable[None]],
        on_written: Callable[[], None],
    ) -> None:
        """`part_epoch`: see JobParts. `commit` returns when the state is committed."""
        self.due = asyncio.Event()
        self._batch, self._store, self._epoch, self._running = batch, store, part_epoch, running
        self._commit, self._on_written = commit, on_written
        self._writing = 0

    @property
    def unwritten(self) -> int:
        """Bytes of lines that are in no part yet."""
        return self._batch.answers.file_bytes + self._writing

    async def run(self) -> None:
        answers = self._batch.answers
        while True:
            await self.due.wait()
            began = time.monotonic()
            while not self._is_time(time.monotonic() - began):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            self.due.clear()
            self._writing = answers.file_bytes
            by_job: dict[str, list[FileAnswer]] = {}
            for answer in answers.take_file():
                by_job.setdefault(answer.source.batch_id, []).append(answer)
            async with asyncio.TaskGroup() as group:
                for batch_id, lines in by_job.items():
                    group.create_task(self.write(self._running[batch_id], lines))
            self._writing = 0
            self._free_buffers()
            self._on_written()

    def _is_time(self, passed_s: float) -> bool:
        answers = self._batch.answers
        if passed_s >= FLUSH_S or answers.file_bytes >= FLUSH_BYTES:
            return True
        # All that was read has ended: nothing more is to be waited for.
        return sum(running.job.open for running in self._running.values()) <= len(answers.file)

    async def write(self, running: LiveJob, answers: list[FileAnswer]) -> None:
        """The lines of `answers` are in the parts and counted by the state; with none it says the status."""
        job = running.job
        async with running.writing:
            # 1. The lines are in objects that no state speaks of. A crash up to here: they are written again.
            for kind, write in job.add(answers):
                name = part_name(job.tenant, job.batch_id, kind, write.number, self._epoch)
                await self._store.write(name, write.data)
            # 2. With the usage rows and the offsets, the state speaks of them: they are there.
            seals = [seal for answer in answers for seal in answer.seals]
            sent = [answer.request_id for answer in answers if answer.sent]
            await self._commit(JobCommit(job.state(), sent, seals))
        for answer in answers:
            BATCH_FINISHED.labels("ok" if answer.code is None else "error").inc()
        running.changed.set()

    def _free_buffers(self) -> None:
        """Of many jobs at once, the largest parts end early."""
        jobs = sorted((running.job for running in self._running.values()), key=lambda job: job.buffered)
        while jobs and sum(job.buffered for job in jobs) > MAX_BUFFERED_BYTES:
            jobs.pop().close_parts()
