"""The log of a live run as lists, to be altered and audited again."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from infra.audit.audit import Settings
from infra.audit.batches import TopicDoor, judge_job
from infra.audit.checks import BilledRow
from infra.audit.clients import ClientRecord
from infra.audit.findings import Report
from infra.audit.fleet import Reservation, counted_handoffs, judge_workers
from infra.audit.reading import TopicReader, read_billed, read_result_lines
from infra.audit.request_log import RequestLog
from infra.audit.transfers import TransferLog
from infra.audit.verdict import Evidence, judge_all
from schemas import topics
from schemas.headers import answered_request
from schemas.records import BatchState, Cancellation, Completion, Heartbeat, InferenceRequest, Tokens, Usage
from schemas.topics import Layout
from streams.ledger.batch_records import asked_request

T = TypeVar("T")


class Logged(NamedTuple):
    partition: int
    timestamp: int
    record: Any


@dataclass
class Recording:
    """`log` is by topic; `lines` are the ids in batches' files. A method alters a copy's lists in place."""

    log: dict[str, list[Logged]] = field(default_factory=dict)
    rows: dict[str, list[BilledRow]] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    answered: list[tuple[str, bytes]] = field(default_factory=list)
    batches: list[tuple[BatchState, dict[str, Counter[str]]]] = field(default_factory=list)
    clients: dict[bytes, list[ClientRecord]] = field(default_factory=dict)
    reservations: list[Reservation] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    now_ms: int = 0

    def copy(self) -> "Recording":
        """Records are shared: replace them, never change them."""
        return replace(
            self,
            log={name: list(records) for name, records in self.log.items()},
            rows={name: list(rows) for name, rows in self.rows.items()},
            asked=list(self.asked),
            answered=list(self.answered),
            batches=[(state, {k: Counter(ids) for k, ids in lines.items()}) for state, lines in self.batches],
            clients={name: list(records) for name, records in self.clients.items()},
            reservations=list(self.reservations),
            heartbeats=list(self.heartbeats),
        )

    def all(self, topic: str, kind: type[T], of: Callable[[T], bool] = lambda record: True) -> list[T]:
        found = (logged.record for logged in self.log[topic])
        return [record for record in found if isinstance(record, kind) and of(record)]

    def change(self, topic: str, change: Callable[[Any], Any]) -> None:
        """`change` gives the record in place of each, or None to leave it out."""
        changed = (logged._replace(record=change(logged.record)) for logged in self.log[topic])
        self.log[topic] = [logged for logged in changed if logged.record is not None]

    def append(self, topic: str, record: Any, partition: int = 0, timestamp: int = 0) -> None:
        self.log[topic].append(Logged(partition, timestamp or self.now_ms, record))

    def requests(self, settings: Settings) -> RequestLog:
        """All of it folded, in the audit's order."""
        folded = RequestLog(
            settings.since_ms, in_flight_ms=settings.allowed.in_flight_ms, keep_tokens=self.clients
        )
        for name in (topics.REQUESTS, topics.CANCELLATIONS):
            for logged in self.log[name]:
                if isinstance(logged.record, InferenceRequest):
                    folded.on_request(logged.record)
                elif isinstance(logged.record, Cancellation):
                    folded.on_cancellation(logged.record, logged.timestamp)
        for logged in self.log[topics.TOKENS]:
            folded.on_reply(logged.partition, logged.record, logged.timestamp)
        for usage in self.all(topics.USAGE, Usage):
            folded.on_usage(usage)
        return folded

    def audit(self, settings: Settings) -> Report:
        report, door = Report(), TopicDoor()
        for asked in self.asked:
            door.asked(*asked)
        for answered in self.answered:
            door.answered(*answered)
        requests = self.requests(settings)
        transfers = TransferLog(requests)
        for logged in self.log[topics.DECODE]:
            transfers.on_record(logged.record, logged.timestamp)
        evidence = Evidence(
            requests=requests,
            transfers=transfers,
            asked_up_to=self.now_ms,
            answered_up_to=self.now_ms,
            transferred_up_to=self.now_ms,
            rows=self.rows,
            reservations=self.reservations,
            counted=counted_handoffs(self.heartbeats),
            clients=self.clients,
            door=door,
        )
        num_open = judge_all(evidence, settings.allowed, report)
        for state, lines in self.batches:
            report.add(judge_job(state, lines))
        report.add(judge_workers(self.heartbeats, idle=num_open == 0))
        return report


async def record(
    servers: str, layout: Layout, settings: Settings, clients: dict[bytes, list[ClientRecord]]
) -> Recording:
    """All that a stack has said, once it is quiet."""
    made = Recording(clients=clients)
    async with TopicReader.open(servers, layout, settings.since_ms) as reader:
        for name in (topics.REQUESTS, topics.CANCELLATIONS, topics.TOKENS, topics.USAGE, topics.DECODE):
            into = made.log[name] = []
            await reader.mark(name)
            await reader.read(
                name,
                lambda value, raw, into=into: into.append(Logged(raw.partition, raw.timestamp, value)),  # type: ignore[misc]
            )
        beats = made.heartbeats
        await reader.read_last(topics.HEARTBEATS, 1.0, lambda value, raw: beats.append(value))
        for tenant in await reader.tenants_with_doors():
            asked, answered = topics.batch_requests(tenant), topics.batch_results(tenant)
            await reader.mark_doors([tenant], topics.batch_requests)
            await reader.mark_doors([tenant], topics.batch_results)
            await reader.read_door(asked, lambda raw, tenant=tenant: _asked(made, tenant, raw), 0)  # type: ignore[misc]
            await reader.read_door(answered, lambda raw, tenant=tenant: _answered(made, tenant, raw), 0)  # type: ignore[misc]
        states: dict[str, BatchState] = {}
        await reader.read_all(topics.BATCH_STATES, lambda value, raw: states.update({value.batch_id: value}))
    assert settings.objects is not None
    made.batches = [(state, await read_result_lines(settings.objects, state)) for state in states.values()]
    for row in await read_billed(settings.sql, settings.since_ms, 0, 1):
        made.rows.setdefault(row.request_id, []).append(row)
    made.now_ms = int(time.time() * 1_000)
    return made


def without_chunk_token(record: Any, request_id: bytes, position: int, *, twice: bool) -> Any:
    """`record` with the token at `position` of a request left out, or there twice."""
    if not isinstance(record, Tokens) or request_id not in record.request_ids:
        return record
    chunks = record.chunks
    for chunk in chunks:
        at = position - chunk.position
        if chunk.request_id != request_id:
            continue
        if twice and at < 0:
            chunk.position += 1  # what comes behind it
        elif 0 <= at < len(chunk.token_ids):
            chunk.token_ids[at : at + 1] = [chunk.token_ids[at]] * 2 if twice else []
    return Tokens.of(record.slot, record.epoch, chunks)


def completion_of(recording: Recording, request_id: bytes) -> Completion:
    return recording.all(topics.TOKENS, Completion, lambda end: end.request_id == request_id)[-1]


def _asked(made: Recording, tenant: str, raw: Any) -> None:
    if (request_id := asked_request(raw.value, tenant, raw.headers)) is not None:
        made.asked.append((tenant, request_id))


def _answered(made: Recording, tenant: str, raw: Any) -> None:
    if (request_id := answered_request(raw.headers)) is not None:
        made.answered.append((tenant, request_id))
