"""The audit of a live system: in which order what is read, so that nothing looks amiss that is only late.

Requests first, then the tokens that answer them, then, some seconds later, what ends must leave behind: usage
rows, results, rows in the billing table, free blocks, no reservation. So whatever is said of an ended request
had time to be done, and what began meanwhile is not looked at.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from obstore.store import ObjectStore

from infra.audit.batches import TopicDoor, billed_of, judge_job, judge_sums, judge_time
from infra.audit.checks import BilledRow, Tolerances
from infra.audit.clients import ClientRecord
from infra.audit.findings import Report
from infra.audit.fleet import counted_handoffs, judge_workers, never_rested
from infra.audit.reading import TopicReader, read_billed, read_reservations, read_result_lines
from infra.audit.request_log import RequestLog
from infra.audit.transfers import TransferLog
from infra.audit.verdict import Evidence, judge_all
from schemas import topics
from schemas.clock import epoch_ms
from schemas.headers import answered_request
from schemas.records import BatchJob, BatchState, Cancellation, Heartbeat, InferenceRequest, Usage
from schemas.topics import DAY_MS, Layout, tenant_of_batch_topic
from streams.ledger.batch_records import asked_request

# Records lie in the log somewhat after the clock said what they say; and an item waits up to a day.
_MARGIN_MS = 60_000
_HEARTBEATS_S = 3.0
_BILLING_TRIES_S = 1.0
# What the billing table may be behind the log.
_BILLING_LATE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`since_ms`: requests accepted from then on are looked at (ms of the epoch). `sql`: the SQL endpoint.
    `objects`: where batches' results lie; None: they are not looked at. `settle_s`: how long an end may take
    to be billed and to free what it held. `passes`: the log is read so often, for memory that is as much
    less: 3 KB for each request in the time, of which one pass takes at most `most`."""

    since_ms: int
    sql: str
    objects: ObjectStore | None = None
    settle_s: float = 5.0
    passes: int = 1
    most: int = 1_000_000
    allowed: Tolerances = field(default_factory=Tolerances)


async def audit(
    servers: str,
    layout: Layout,
    settings: Settings,
    clients: Mapping[bytes, list[ClientRecord]] | None = None,
) -> Report:
    """Raises AuditError, TooManyError, KafkaError, TimeoutError where something cannot be read."""
    async with TopicReader.open(servers, layout, settings.since_ms) as reader:
        return await _Audit(reader, settings, clients or {}).run()


class _Audit:
    def __init__(
        self, reader: TopicReader, settings: Settings, clients: Mapping[bytes, list[ClientRecord]]
    ) -> None:
        self._reader, self._settings, self._clients = reader, settings, clients
        self._report = Report()
        self._num_open = 0
        self._door = TopicDoor()
        self._states: list[BatchState] = []
        self._billed: dict[str, tuple[int, int]] = {}

    async def run(self) -> Report:
        reader, report = self._reader, self._report
        # 1. What was asked for up to now. A Retry lies before the attempt that it allows.
        tenants = await reader.tenants_with_doors()
        await reader.mark_doors(tenants, topics.batch_requests)
        await reader.mark(topics.REQUESTS)
        asked_up_to = epoch_ms()
        # 2. What was answered up to now, and what was stopped.
        await reader.mark(topics.TOKENS, topics.CANCELLATIONS)
        answered_up_to = epoch_ms()
        # 3. What had ended by then is billed and answered by now, and holds nothing any more.
        await asyncio.sleep(self._settings.settle_s)
        await reader.mark(topics.USAGE)
        await reader.mark_doors(tenants, topics.batch_results)
        await reader.mark(topics.DECODE)
        transferred_up_to = epoch_ms()
        beats = await self._heartbeats()
        reservations = await read_reservations(_addresses(beats, "admission"))
        await self._read_batches(tenants)
        # 4. All that, folded.
        for number in range(self._settings.passes):
            requests = await self._fold(number)
            evidence = Evidence(
                requests=requests,
                transfers=await self._transfers(requests),
                asked_up_to=asked_up_to,
                answered_up_to=answered_up_to,
                transferred_up_to=transferred_up_to,
                rows=await self._billed_rows(requests, number),
                reservations=reservations,
                counted=counted_handoffs(beats),
                clients=self._clients,
                door=self._door,
            )
            self._num_open += judge_all(evidence, self._settings.allowed, report)
            self._add_sums(requests)
        report.looked_at["reservations"] = len(reservations)
        report.add(judge_sums(self._states, self._billed))
        await self._judge_workers(beats)
        for name, count in sorted(reader.unreadable.items()):
            report.not_judged.append(f"{name}: {count} records that cannot be decoded")
        return report

    async def _fold(self, number: int) -> RequestLog:
        settings, reader = self._settings, self._reader
        with_ids = {
            request_id
            for request_id, records in self._clients.items()
            if any(record.token_ids is not None for record in records)
        }
        requests = RequestLog(
            settings.since_ms,
            in_flight_ms=settings.allowed.in_flight_ms,
            keep_tokens=with_ids,
            number=number,
            passes=settings.passes,
            most=settings.most,
        )

        def asked(value: object, record: Any) -> None:
            if isinstance(value, InferenceRequest):
                requests.on_request(value)
            elif isinstance(value, Cancellation):
                requests.on_cancellation(value, record.timestamp)

        def billed(value: object, record: Any) -> None:
            if isinstance(value, Usage):
                requests.on_usage(value)

        await reader.read(topics.REQUESTS, asked, _MARGIN_MS)
        await reader.read(topics.CANCELLATIONS, asked, _MARGIN_MS)
        await reader.read(
            topics.TOKENS,
            lambda value, record: requests.on_reply(record.partition, value, record.timestamp),
            _MARGIN_MS,
        )
        await reader.read(topics.USAGE, billed, _MARGIN_MS)
        return requests

    async def _transfers(self, requests: RequestLog) -> TransferLog:
        transfers = TransferLog(requests)
        await self._reader.read(
            topics.DECODE, lambda value, record: transfers.on_record(value, record.timestamp), _MARGIN_MS
        )
        return transfers

    def _add_sums(self, requests: RequestLog) -> None:
        for state in self._states:
            sums = zip(self._billed.get(state.batch_id, (0, 0)), billed_of(state, requests), strict=True)
            input_tokens, output_tokens = map(sum, sums)
            self._billed[state.batch_id] = input_tokens, output_tokens

    async def _billed_rows(self, requests: RequestLog, number: int) -> dict[str, list[BilledRow]]:
        """By request_id. The ledger may be behind: what is missing is asked for again, for a while."""
        settings = self._settings
        wanted = {each.name: each.row.version for each in requests if each.is_over and each.row is not None}
        deadline = time.monotonic() + _BILLING_LATE_S
        while True:
            found: dict[str, list[BilledRow]] = {}
            for row in await read_billed(settings.sql, settings.since_ms, number, settings.passes):
                found.setdefault(row.request_id, []).append(row)
            complete = all(
                any(row.version >= version for row in found.get(name, ())) for name, version in wanted.items()
            )
            if complete or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(_BILLING_TRIES_S)

    async def _read_batches(self, tenants: Iterable[str]) -> None:
        reader, report = self._reader, self._report

        def asked(record: Any) -> None:
            tenant = tenant_of_batch_topic(record.topic) or ""
            if (request_id := asked_request(record.value, tenant, record.headers)) is not None:
                self._door.asked(tenant, request_id)

        for tenant in tenants:

            def answered(record: Any, tenant: str = tenant) -> None:
                if (request_id := answered_request(record.headers)) is not None:
                    self._door.answered(tenant, request_id)

            await reader.read_door(topics.batch_requests(tenant), asked, DAY_MS)
            await reader.read_door(topics.batch_results(tenant), answered, DAY_MS)
        report.looked_at["batch records"] = len(self._door)
        if self._settings.objects is None:
            report.not_judged.append("batches of files: no object store was named")
            return
        await self._read_jobs(self._settings.objects)

    async def _read_jobs(self, store: ObjectStore) -> None:
        jobs: dict[str, BatchJob] = {}
        states: dict[str, BatchState] = {}

        def take(value: object, record: Any) -> None:
            if isinstance(value, BatchJob) and value.created_at >= self._settings.since_ms:
                jobs[value.batch_id] = value
            elif isinstance(value, BatchState) and value.batch_id in jobs:
                states[value.batch_id] = value

        await self._reader.read_all(topics.BATCH_JOBS, take)
        await self._reader.read_all(topics.BATCH_STATES, take)
        self._states = list(states.values())
        allowed = self._settings.allowed
        for job in jobs.values():
            self._report.add(judge_time(job, states.get(job.batch_id), epoch_ms(), allowed))
        for state in self._states:
            lines = await read_result_lines(store, state)
            self._report.add(judge_job(state, lines))
            self._report.looked_at["batch lines"] += sum(ids.total() for ids in lines.values())
        self._report.looked_at["batches"] = len(self._states)

    async def _heartbeats(self) -> list[Heartbeat]:
        found: list[Heartbeat] = []
        await self._reader.read_last(
            topics.HEARTBEATS,
            _HEARTBEATS_S,
            lambda value, record: found.append(value) if isinstance(value, Heartbeat) else None,
        )
        return found

    async def _judge_workers(self, beats: list[Heartbeat]) -> None:
        # A request that came after the mark may run: then only a worker that rests can be judged.
        idle = self._num_open == 0 and not await self._reader.came_since(topics.REQUESTS, InferenceRequest)
        if idle:
            beats = await self._heartbeats()
        self._report.looked_at["workers"] = len({beat.slot for beat in beats if beat.role == "worker"})
        self._report.add(judge_workers(beats, idle=idle))
        if not idle and (busy := never_rested(beats)):
            self._report.not_judged.append(
                f"blocks of workers {busy}, that never rested:"
                f" requests are open ({self._num_open}) or came meanwhile"
            )


def _addresses(beats: Iterable[Heartbeat], role: str) -> list[str]:
    """Where the newest life of each slot serves HTTP."""
    newest: dict[int, Heartbeat] = {}
    for beat in beats:
        if beat.role == role and (beat.slot not in newest or beat.epoch >= newest[beat.slot].epoch):
            newest[beat.slot] = beat
    return [beat.address for _, beat in sorted(newest.items()) if beat.address]
