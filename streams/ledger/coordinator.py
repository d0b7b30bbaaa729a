"""One coordinator shard at work: its tenants' requests in, its reply partition, answers out.

Thin: decisions are batch.py's, sends batch_sender.py's. Whatever fails here ends the shard, and it begins
anew from what is committed; the answers and the offsets they stand for are one transaction, so nothing is
lost or doubled.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas import topics
from schemas.clock import epoch_ms
from schemas.codec import CodecError, decode
from schemas.dead_letters import dead_letter
from schemas.fleet import FleetView
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.records import Attach, BatchCancel, BatchJob, BatchState, Detach, Duplicate, Tenant
from schemas.stop_client import stop_client
from streams.consumer import Consumer, assign_at, decoded
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import Action
from streams.ledger.batch_offsets import admission_offsets
from streams.ledger.batch_records import BadRecord, encode_error, parse
from streams.ledger.batch_sender import BatchSender
from streams.ledger.commits import Committer
from streams.ledger.earlier_answers import EarlierAnswers
from streams.ledger.job_runner import JobRunner
from streams.ledger.job_store import JobStore
from streams.ledger.metrics import BATCH_OPEN
from streams.ledger.results import OutRecord, ResultWriter
from streams.ledger.source_reader import SourceReader

log = logging.getLogger(__name__)

TICK_S = 0.1
START_TIMEOUT_S = 30.0
_STOP_S = 5.0
_POLL_MS = 200


@dataclass(frozen=True, slots=True)
class ShardClients:
    """Clients of one shard, not started. `committed` gives (offset, metadata) of the group, or None."""

    sources: Consumer
    jobs: Consumer
    results: Consumer
    replies: Consumer
    writer: ResultWriter
    partition: Callable[[str, int], Any]
    committed: Callable[[str, int], Any]


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """`part_epoch`: of this life of the shard, as it is in the names of what it writes."""

    shard: int
    shards: int
    slot: int
    epoch: int
    end_ms: int
    window: int
    prefix_order: bool
    part_epoch: int


class ShardCoordinator:
    def __init__(
        self,
        settings: ShardSettings,
        clients: ShardClients,
        producer: Any,
        models: Mapping[str, LoadedModel],
        fleet: FleetView,
        tenants: Callable[[], dict[str, Tenant]],
        store: JobStore,
    ) -> None:
        """`tenants`: those whose topics are to be read now. `producer` is shared and started."""
        self._settings, self._clients = settings, clients
        self._models, self._fleet, self._tenants, self._store = models, fleet, tenants, store
        self._replies_tp = clients.partition(
            topics.TOKENS, topics.partition(settings.shard, PriorityClass.BATCH)
        )
        self._sources = SourceReader(clients.sources, clients.partition, clients.committed, settings.window)
        self._earlier = EarlierAnswers(clients.results, clients.partition)
        self._batch: BatchShard | None = None
        self._committer: Committer | None = None
        self._jobs: JobRunner | None = None
        self._sender = BatchSender(
            producer,
            self._replies_tp.partition,
            settings.shards,
            lambda *sent: self.batch.on_sent(*sent),
            lambda *refused: self.batch.on_too_large(*refused),
        )
        self.ready = False

    @property
    def batch(self) -> BatchShard:
        if self._batch is None:
            raise RuntimeError("the shard has not begun")
        return self._batch

    @property
    def committer(self) -> Committer:
        if self._committer is None:
            raise RuntimeError("the shard has not begun")
        return self._committer

    @property
    def jobs(self) -> JobRunner:
        if self._jobs is None:
            raise RuntimeError("the shard has not begun")
        return self._jobs

    async def run(self) -> None:
        """Until cancelled. Raises what ended the shard; begin anew with new clients then."""
        clients = self._clients
        try:
            # 1. Whoever had the shard can commit no more.
            await clients.writer.start()
            async with asyncio.timeout(START_TIMEOUT_S):
                for client in (clients.sources, clients.replies, clients.jobs, clients.results):
                    await client.start()
            # 2. What happened so far.
            await self._recover()
            self._jobs = self._job_runner()
            await self._recover_jobs()
            self.ready = True
            # 3. On from there.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_replies())
                group.create_task(self._follow_sources())
                group.create_task(self._follow_jobs())
                group.create_task(self.jobs.run())
                group.create_task(self.committer.run())
                group.create_task(self._tick())
                group.create_task(self._sender.watch())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self.ready = False
            BATCH_OPEN.labels(str(self._settings.shard)).set(0)
            for client in (clients.sources, clients.replies, clients.jobs, clients.results):
                await stop_client(client, _STOP_S)
            await clients.writer.stop()

    async def _recover(self) -> None:
        settings, clients, tp = self._settings, self._clients, self._replies_tp
        async with asyncio.timeout(START_TIMEOUT_S):
            committed = await clients.committed(tp.topic, tp.partition)
            begin = (await clients.replies.beginning_offsets([tp]))[tp]
            end = (await clients.replies.end_offsets([tp]))[tp]
        resume = end if committed is None else min(max(committed[0], begin), end)
        if committed is not None and resume != committed[0]:
            log.warning(
                "the reply partition does not hold what was committed",
                extra={"partition": tp.partition, "committed": committed[0], "begin": begin, "end": end},
            )
        self._batch = BatchShard(
            settings.shard,
            settings.slot,
            settings.epoch,
            end_ms=settings.end_ms,
            position=resume,
            now_ms=epoch_ms(),
        )
        self._committer = Committer(
            settings.shard, self._batch, clients.writer, self._sender, self._sources, self._earlier, tp
        )
        if committed is None:
            # Nothing is sent before there is a place to come back to.
            await clients.writer.commit([], {(tp.topic, tp.partition): (resume, "")})
        assign_at(clients.replies, {tp: resume})
        while await clients.replies.position(tp) < end:
            await self._read_replies()
        await self._sender.execute(self.batch.claims())
        log.info("coordinator shard begun", extra={"shard": settings.shard, "resumed_at": resume, "end": end})

    def _job_runner(self) -> JobRunner:
        settings = self._settings
        return JobRunner(
            settings.shard,
            settings.part_epoch,
            self._store,
            self.batch,
            self._models,
            self._fleet,
            self._tenants,
            self._sender.execute,
            self.committer.commit,
            prefix_order=settings.prefix_order,
        )

    async def _recover_jobs(self) -> None:
        """All states that are committed, then all jobs."""
        settings, consumer = self._settings, self._clients.jobs
        states, jobs = (
            self._clients.partition(topic, settings.shard)
            for topic in (topics.BATCH_STATES, topics.BATCH_JOBS)
        )
        async with asyncio.timeout(START_TIMEOUT_S):
            ends = await consumer.end_offsets([states, jobs])
            begins = await consumer.beginning_offsets([states, jobs])
        for tp in (states, jobs):
            assign_at(consumer, {tp: begins[tp]})
            while await consumer.position(tp) < ends[tp]:
                await self._read_jobs()

    async def _follow_jobs(self) -> None:
        while True:
            await self._read_jobs()

    async def _read_jobs(self) -> None:
        for records in (await self._clients.jobs.getmany(timeout_ms=_POLL_MS)).values():
            for record in records:
                if record.value is None:
                    continue  # it had ended when it was deleted
                value = decoded(record, BatchState, BatchJob, BatchCancel)
                if isinstance(value, BatchState):
                    self.jobs.on_state(value)
                elif value is not None:
                    self.jobs.on_job(value)

    async def _follow_replies(self) -> None:
        while True:
            await self._read_replies()

    async def _read_replies(self) -> None:
        for records in (await self._clients.replies.getmany(timeout_ms=_POLL_MS)).values():
            now, clock = epoch_ms(), self._fleet.clock.now_ms
            actions: list[Action] = []
            for record in records:
                try:
                    value = decode(record.value or b"")
                except CodecError as e:
                    # Where tokens were in it, the fold will show a gap.
                    log.warning("undecodable reply", extra={"offset": record.offset, "error": str(e)})
                    continue
                if not isinstance(value, Attach | Detach | Duplicate):
                    actions += self.batch.on_reply(value, record.offset, record.timestamp, now, clock)
            await self._sender.execute(actions)
            self._note_answers()

    async def _follow_sources(self) -> None:
        tenants = self._tenants()
        while True:
            known, tenants = tenants, self._tenants()
            if changed := {name for name, rules in tenants.items() if known.get(name) is not rules}:
                self.batch.rules_changed(changed, epoch_ms())
            for name, records in (await self._sources.read(set(tenants))).items():
                await self._take(name, tenants.get(name), records)

    async def _take(self, tenant: str, rules: Tenant | None, records: list[Any]) -> None:
        for record in records:
            if not self._sources.windows[tenant].take(record.offset):
                continue
            read = await asyncio.to_thread(
                parse,
                record.value,
                tenant,
                record.offset,
                record.timestamp,
                self._models,
                rules,
                record.headers,
            )
            if isinstance(read, BadRecord):
                self._refuse(read, record)
                continue
            self._sources.windows[tenant].weigh(record.offset, read.num_requests)
            if (answer := await self._answered(tenant, read.request_id)) is not None:
                self.batch.repeat(read, answer)
            else:
                await self._sender.execute(self.batch.accept(read, epoch_ms(), self._fleet.clock.now_ms))
        self._note_answers()

    async def _answered(self, tenant: str, request_id: bytes) -> bytes | None:
        """What a producer's own retry was answered with, where this life does not know it itself."""
        if self.batch.has(request_id):
            return None
        return await self._earlier.find(tenant, request_id)

    def _refuse(self, bad: BadRecord, record: Any) -> None:
        log.warning(
            "batch record refused",
            extra={"tenant": bad.source.tenant, "offset": bad.source.offset, "code": bad.error.code},
        )
        most, reason = topics.MAX_DEAD_LETTER_BYTES, bad.error.message
        letter = dead_letter(record.key, record.value, record.headers or (), reason, most)
        topic = topics.dlq(topics.batch_requests(bad.source.tenant))
        self.committer.put_letter(OutRecord(topic, *letter))
        self.batch.answers.refuse(bad.source, encode_error(bad.source, None, bad.error))

    def _note_answers(self) -> None:
        BATCH_OPEN.labels(str(self._settings.shard)).set(self.batch.open)
        self.committer.wake()
        if self._jobs is not None:
            self._jobs.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            actions = self.batch.tick(epoch_ms(), self._fleet, admission_offsets(self._fleet))
            await self._sender.execute(actions)
            self._note_answers()
