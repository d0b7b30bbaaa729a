"""One coordinator shard at work: its tenants' requests in, its reply partition, answers out.

Thin: decisions are batch.py's, sends batch_sender.py's. Whatever fails here ends the shard, and it begins
anew from what is committed; the answers and the offsets they stand for are one transaction, so nothing is
lost or doubled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas import topics
from schemas.codec import CodecError, decode
from schemas.fleet import FleetView
from schemas.headers import REASON
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.records import Attach, Detach, Duplicate, Tenant
from streams.consumer import Consumer, assign_at
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import Action
from streams.ledger.batch_offsets import admission_offsets
from streams.ledger.batch_records import BadRecord, BatchItem, encode_error, parse
from streams.ledger.batch_sender import BatchSender
from streams.ledger.metrics import BATCH_FINISHED, BATCH_FLUSH, BATCH_OPEN, DLQ
from streams.ledger.results import OutRecord, ResultWriter, result_record
from streams.ledger.source_reader import SOURCE_PARTITION, SourceReader, wait_for

log = logging.getLogger(__name__)

TICK_S = 0.1
# Answers that end within this go out in one transaction, which takes about 30 ms.
GATHER_S = 0.02
COMMIT_S = 10.0
START_TIMEOUT_S = 30.0
_POLL_MS = 200


@dataclass(frozen=True, slots=True)
class ShardClients:
    """Clients of one shard, not started. `committed` gives (offset, metadata) of the group, or None."""

    sources: Consumer
    replies: Consumer
    writer: ResultWriter
    partition: Callable[[str, int], Any]
    committed: Callable[[str, int], Any]


@dataclass(frozen=True, slots=True)
class ShardSettings:
    shard: int
    shards: int
    slot: int
    epoch: int
    end_ms: int
    window: int


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ShardCoordinator:
    def __init__(
        self,
        settings: ShardSettings,
        clients: ShardClients,
        producer: Any,
        models: Mapping[str, LoadedModel],
        fleet: FleetView,
        tenants: Callable[[], dict[str, Tenant]],
    ) -> None:
        """`tenants`: those whose topics are to be read now. `producer` is shared and started."""
        self._settings, self._clients = settings, clients
        self._models, self._fleet, self._tenants = models, fleet, tenants
        self._replies_tp = clients.partition(
            topics.TOKENS, topics.partition(settings.shard, PriorityClass.BATCH)
        )
        self._sources = SourceReader(clients.sources, clients.partition, clients.committed, settings.window)
        self._dead_letters: list[OutRecord] = []
        self._finished = asyncio.Event()
        self._batch: BatchShard | None = None
        self._sender = BatchSender(producer, self._replies_tp.partition, settings.shards, self._on_sent)
        self.ready = False

    @property
    def batch(self) -> BatchShard:
        if self._batch is None:
            raise RuntimeError("the shard has not begun")
        return self._batch

    async def run(self) -> None:
        """Until cancelled. Raises what ended the shard; begin anew with new clients then."""
        clients = self._clients
        try:
            # 1. Whoever had the shard can commit no more.
            await clients.writer.start()
            async with asyncio.timeout(START_TIMEOUT_S):
                await clients.sources.start()
                await clients.replies.start()
            # 2. What happened so far.
            await self._recover()
            self.ready = True
            # 3. On from there.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_replies())
                group.create_task(self._follow_sources())
                group.create_task(self._flush_answers())
                group.create_task(self._tick())
                group.create_task(self._sender.watch())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self.ready = False
            BATCH_OPEN.labels(str(self._settings.shard)).set(0)
            for client in (clients.sources, clients.replies):
                await _stop(client)
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
            log_end=end,
            now_ms=_now_ms(),
        )
        if committed is None:
            # Nothing is sent before there is a place to come back to.
            await clients.writer.commit([], {(tp.topic, tp.partition): (resume, "")})
        assign_at(clients.replies, {tp: resume})
        while await clients.replies.position(tp) < end:
            await self._read_replies()
        await self._sender.execute(self.batch.claims())
        log.info("coordinator shard begun", extra={"shard": settings.shard, "resumed_at": resume, "end": end})

    async def _follow_replies(self) -> None:
        while True:
            await self._read_replies()

    async def _read_replies(self) -> None:
        for records in (await self._clients.replies.getmany(timeout_ms=_POLL_MS)).values():
            now, clock = _now_ms(), self._fleet.clock.now_ms
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
        while True:
            tenants = self._tenants()
            for name, records in (await self._sources.read(set(tenants))).items():
                await self._take(name, tenants.get(name), records)

    async def _take(self, tenant: str, rules: Tenant | None, records: list[Any]) -> None:
        for record in records:
            if not self._sources.windows[tenant].take(record.offset):
                continue
            read = await asyncio.to_thread(
                parse, record.value, tenant, record.offset, record.timestamp, self._models, rules
            )
            if isinstance(read, BatchItem):
                await self._sender.execute(self.batch.accept(read, _now_ms(), self._fleet.clock.now_ms))
            else:
                self._refuse(read, record)
        self._note_answers()

    def _refuse(self, bad: BadRecord, record: Any) -> None:
        log.warning(
            "batch record refused",
            extra={"tenant": bad.source.tenant, "offset": bad.source.offset, "code": bad.error.code},
        )
        reason = bad.error.message.encode(errors="replace")
        headers = [*((name, value) for name, value in record.headers or ()), (REASON, reason)]
        topic = topics.dlq(topics.batch_requests(bad.source.tenant))
        self._dead_letters.append(OutRecord(topic, record.key, record.value, headers))
        self.batch.refuse(bad.source, encode_error(bad.source, None, bad.error))

    def _note_answers(self) -> None:
        BATCH_OPEN.labels(str(self._settings.shard)).set(self.batch.open)
        if self.batch.answers:
            self._finished.set()

    async def _flush_answers(self) -> None:
        committed_at = time.monotonic()
        last: Mapping[tuple[str, int], tuple[int, str]] = {}
        while True:
            if await wait_for(self._finished, COMMIT_S):
                await asyncio.sleep(GATHER_S)
                self._finished.clear()
            answers, self.batch.answers = self.batch.answers, []
            letters, self._dead_letters = self._dead_letters, []
            # One moment's view: what ends from here on is still open in it, and is read again after a crash.
            for answer in answers:
                self._sources.windows[answer.source.tenant].answer(answer.source.offset)
            offsets = self._offsets()
            if not answers and (offsets == last or time.monotonic() - committed_at < COMMIT_S):
                continue
            began = time.perf_counter()
            # 1. The owner's usage rows. A crash from here on writes them again: the same rows.
            seals = {a.seal.request_id: a.seal for a in answers if a.seal is not None}
            await self._sender.seal(seals.values())
            # 2. Answers, dead letters and offsets: all or nothing.
            records = [result_record(a.source.tenant, a.source.custom_id, a.value) for a in answers]
            await self._clients.writer.commit(records + letters, offsets)
            last, committed_at = offsets, time.monotonic()
            BATCH_FLUSH.observe(time.perf_counter() - began)
            for answer in answers:
                BATCH_FINISHED.labels("ok" if answer.ok else "error").inc()
            DLQ.labels("batch").inc(len(letters))
            self._sources.room_freed()

    def _offsets(self) -> dict[tuple[str, int], tuple[int, str]]:
        tp = self._replies_tp
        offsets = {(tp.topic, tp.partition): (self.batch.resume_offset, "")}
        for tenant, window in self._sources.windows.items():
            offsets[topics.batch_requests(tenant), SOURCE_PARTITION] = window.commit()
        return offsets

    def _on_sent(self, request_id: bytes, attempt: int, offset: int) -> None:
        self.batch.on_sent(request_id, attempt, offset)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            actions = self.batch.tick(_now_ms(), self._fleet, admission_offsets(self._fleet))
            await self._sender.execute(actions)
            self._note_answers()


async def _stop(client: Any) -> None:
    try:
        async with asyncio.timeout(5):
            await client.stop()
    except Exception as e:
        log.warning("a consumer did not stop in order", extra={"error": repr(e)})
