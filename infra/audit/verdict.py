"""All that was gathered about some requests, judged together. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from infra.audit.batches import TopicDoor
from infra.audit.checks import BilledRow, Tolerances, judge, judge_billed, unknown_rows
from infra.audit.clients import ClientRecord, judge_client
from infra.audit.findings import Report
from infra.audit.fleet import Reservation, judge_reservations
from infra.audit.history import History
from infra.audit.request_log import RequestLog
from infra.audit.transfers import Counted, TransferLog


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Times are ms of the epoch. `asked_up_to`: inference.requests was read so far, `answered_up_to`:
    inference.tokens, and all else some time later; `transfers` up to `transferred_up_to`, and `counted` by
    the heartbeats of the seconds behind that. `rows` of the billing table by request_id in hex, and
    `clients` by request_id; both may hold what is of other passes, which is left alone."""

    requests: RequestLog
    transfers: TransferLog
    asked_up_to: int
    answered_up_to: int
    transferred_up_to: int
    rows: Mapping[str, Sequence[BilledRow]]
    reservations: Sequence[Reservation] = ()
    counted: Counted = field(default_factory=dict)
    clients: Mapping[bytes, Sequence[ClientRecord]] = field(default_factory=dict)
    door: TopicDoor = field(default_factory=TopicDoor)


def judge_all(evidence: Evidence, allowed: Tolerances, report: Report) -> int:
    """Adds what is found, and counts what was looked at. Returns how many requests are open."""
    requests, rows = evidence.requests, evidence.rows
    num_open = 0
    for history in requests:
        report.add(judge(history, evidence.answered_up_to, allowed))
        if history.is_over:
            report.add(judge_billed(history, rows.get(history.name, ())))
            report.looked_at["ended"] += 1
            report.looked_at["tokens"] += history.num_tokens
            report.looked_at.update(_what_it_met(history))
        else:
            num_open += 1
    report.add(unknown_rows(_strange(evidence, allowed)))
    for request_id, records in evidence.clients.items():
        if requests.has(request_id):
            for record in records:
                report.add(judge_client(record, requests.get(request_id)))
            report.looked_at["client records"] += len(records)
    report.add(evidence.door.judge(requests))
    transfers = evidence.transfers
    report.add(transfers.judge(evidence.counted, evidence.transferred_up_to, allowed))
    report.add(transfers.counted_too_long(evidence.counted, evidence.answered_up_to))
    report.looked_at["transfers"] += len(transfers)
    report.looked_at["adopted"] += transfers.num_adopted
    held = judge_reservations(evidence.reservations, requests, evidence.answered_up_to, allowed.clock_ms)
    report.add(held)
    report.looked_at["requests"] += len(requests)
    report.looked_at["billed rows"] += sum(map(len, rows.values()))
    return num_open


def _what_it_met(history: History) -> Iterator[str]:
    """What makes accounting for it harder."""
    if history.state.attempt > 1:
        yield "retried"
    if history.is_cancelled:
        yield "cancelled"
    if history.waived:
        yield "waived"
    if history.joined:
        yield "joined"


def _strange(evidence: Evidence, allowed: Tolerances) -> Iterator[BilledRow]:
    """Rows of which no request is known, and that are not of what came behind the mark."""
    for name, rows in evidence.rows.items():
        request_id = bytes.fromhex(name)
        if evidence.requests.has(request_id) and evidence.requests.get(request_id) is None:
            yield from (row for row in rows if row.accepted_at < evidence.asked_up_to - allowed.clock_ms)
