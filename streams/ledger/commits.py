"""The one transaction after another of a shard: answers, states of jobs, and the offsets they stand for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas import topics
from schemas.records import BatchState, Usage
from streams.ledger.batch import BatchShard
from streams.ledger.batch_sender import BatchSender
from streams.ledger.earlier_answers import EarlierAnswers
from streams.ledger.metrics import BATCH_FINISHED, BATCH_FLUSH, DLQ
from streams.ledger.results import OutRecord, ResultWriter, result_record, state_record
from streams.ledger.source_reader import SOURCE_PARTITION, SourceReader, wait_for

# Answers that end within this go out in one transaction, which takes about 30 ms.
GATHER_S = 0.02
COMMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class JobCommit:
    """A job's state, with the requests whose lines it counts for the first time. The lines are written."""

    state: BatchState
    request_ids: Sequence[bytes] = ()
    seals: Sequence[Usage] = ()


class Committer:
    """What `run` raises leaves open what of the last transaction is there."""

    def __init__(
        self,
        shard: int,
        batch: BatchShard,
        writer: ResultWriter,
        sender: BatchSender,
        sources: SourceReader,
        earlier: EarlierAnswers,
        replies: Any,
    ) -> None:
        """`replies`: the shard's reply partition."""
        self._earlier = earlier
        self._shard, self._batch, self._replies = shard, batch, replies
        self._writer, self._sender, self._sources = writer, sender, sources
        self._letters: list[OutRecord] = []
        self._jobs: list[tuple[JobCommit, asyncio.Future[None]]] = []
        self._due = asyncio.Event()

    def wake(self) -> None:
        """There may be answers for topics."""
        if self._batch.answers.topic:
            self._due.set()

    def put_letter(self, letter: OutRecord) -> None:
        """It goes out with the answer that the shard has for the same record."""
        self._letters.append(letter)

    async def commit(self, job: JobCommit) -> None:
        """Returns when it is part of a transaction that was committed."""
        done = asyncio.get_running_loop().create_future()
        self._jobs.append((job, done))
        self._due.set()
        await done

    async def run(self) -> None:
        committed_at = time.monotonic()
        last: Mapping[tuple[str, int], tuple[int, str]] = {}
        while True:
            if await wait_for(self._due, COMMIT_S):
                await asyncio.sleep(GATHER_S)
                self._due.clear()
            batch = self._batch
            answers, batch.answers.topic = batch.answers.topic, []
            letters, self._letters = self._letters, []
            jobs, self._jobs = self._jobs, []
            # One moment's view: what ends from here on is still open in it, and is read again after a crash.
            for answer in answers:
                self._sources.windows[answer.source.tenant].answer(answer.source.offset)
            for job, _ in jobs:
                batch.answers.release(job.request_ids)
            offsets = self._offsets()
            idle = not answers and not jobs
            if idle and (offsets == last or time.monotonic() - committed_at < COMMIT_S):
                continue
            began = time.perf_counter()
            # 1. The owner's usage rows. A crash from here on writes them again: the same rows.
            seals = {seal.request_id: seal for answer in answers for seal in answer.seals}
            seals |= {seal.request_id: seal for job, _ in jobs for seal in job.seals}
            await self._sender.seal(seals.values())
            # 2. Answers, states, dead letters and offsets: all or nothing.
            records = [result_record(answer) for answer in answers]
            states = [state_record(job.state, self._shard) for job, _ in jobs]
            places = await self._writer.commit([*records, *states, *letters], offsets)
            for answer, offset in zip(answers, places, strict=False):
                if answer.request_id is not None:
                    self._earlier.put(answer.source.tenant, answer.request_id, offset)
            last, committed_at = offsets, time.monotonic()
            BATCH_FLUSH.observe(time.perf_counter() - began)
            for answer in answers:
                BATCH_FINISHED.labels("ok" if answer.ok else "error").inc()
            DLQ.labels("batch").inc(len(letters))
            for _, done in jobs:
                if not done.done():
                    done.set_result(None)
            self._sources.room_freed()

    def _offsets(self) -> dict[tuple[str, int], tuple[int, str]]:
        tp = self._replies
        offsets = {(tp.topic, tp.partition): (self._batch.resume_offset, "")}
        for tenant, window in self._sources.windows.items():
            offsets[topics.batch_requests(tenant), SOURCE_PARTITION] = window.commit()
        return offsets
