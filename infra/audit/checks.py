"""What must hold of each request by the log alone, and of its row in the billing table. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infra.audit.findings import Finding, Kind
from infra.audit.history import History
from schemas.records import Failed, Rejected

_ENGINE_FAULT = "engine_fault"
_CANCELLED_IN_THE_QUEUE = 499
# A batch coordinator leaves the end to admission for so much longer.
ITEM_GRACE_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """What a system in order may be late by. ms.

    `deadline_ms`: an end may come so long after `end_ms` (owners ask for it, wait, and then say it
    themselves). `cancel_ms`: tokens may lie in the log so long after the cancel that stops them.
    `in_flight_ms`: tokens that lie there so long before a cancel have reached the client. `gap_ms`: an owner
    retries over a gap within this. `clock_ms`: clocks of processes and broker differ by no more.
    `transfer_ms`: both sides say so long after its deadline, or its request's end, that a transfer is over.
    """

    deadline_ms: int = 30_000
    cancel_ms: int = 2_000
    in_flight_ms: int = 2_000
    gap_ms: int = 10_000
    clock_ms: int = 5_000
    transfer_ms: int = 5_000


class BilledRow(NamedTuple):
    """A row as headrace.usage_final shows it."""

    request_id: str
    tenant: str
    version: int
    input_tokens: int
    output_tokens: int
    accepted_at: int


def judge(history: History, now_ms: int, allowed: Tolerances) -> Iterator[Finding]:
    """By the log alone. `now_ms`: up to when inference.tokens was read; usage must have been read further."""
    state = history.state
    if history.joined:
        yield from _cost_nothing(history)
        return
    attempts = max(history.attempts_sent, history.attempts_told)
    if attempts > state.attempt:
        # Owners act on a Retry only when it is read back, and one behind an end does not count.
        yield _finding(Kind.RETRIED_AFTER_END, history, counted=state.attempt, began=attempts)
    if history.ended_twice:
        yield _finding(Kind.TWO_ENDS, history, attempt=state.attempt)
    if not history.is_over:
        yield from _judge_open(history, now_ms, allowed)
        return
    yield from _judge_row(history)
    cancelled_at = history.cancelled_at(state.attempt)
    if cancelled_at is not None and history.last_token_at > cancelled_at + allowed.cancel_ms:
        late_ms = history.last_token_at - cancelled_at
        yield _finding(Kind.DECODED_AFTER_CANCEL, history, steps=history.late_steps, late_ms=late_ms)


def judge_billed(history: History, rows: Sequence[BilledRow]) -> Iterator[Finding]:
    """`rows`: all that the billing table shows of an ended request, of whatever tenant."""
    counts = history.row
    if counts is None:
        if rows:
            tokens = sum(row.output_tokens for row in rows)
            yield _finding(Kind.UNKNOWN_ROW, history, rows=len(rows), output_tokens=tokens)
    elif not rows:
        yield _finding(
            Kind.LOST_ROW, history, missing_in="headrace.usage", output_tokens=counts.output_tokens
        )
    elif len(rows) > 1:
        tenants = ",".join(sorted({row.tenant for row in rows}))
        tokens = sum(row.output_tokens for row in rows)
        yield _finding(
            Kind.DOUBLED_ROW,
            history,
            rows=len(rows),
            tenants=tenants,
            output_tokens=tokens,
            counted=counts.output_tokens,
        )
    elif (rows[0].tenant, rows[0].version) != (counts.tenant, counts.version):
        yield _finding(
            Kind.WRONG_ROW,
            history,
            billed=rows[0].output_tokens,
            counted=counts.output_tokens,
            version=rows[0].version,
            highest_version=counts.version,
        )


def unknown_rows(rows: Iterable[BilledRow]) -> Iterator[Finding]:
    """Rows of requests that were accepted in the time looked at, and of which the log knows nothing."""
    for row in rows:
        yield Finding(Kind.UNKNOWN_ROW, row.request_id, row.tenant, {"output_tokens": row.output_tokens})


def must_have_row(history: History) -> bool:
    """Whether an ended request must have one, if only to say that it cost nothing."""
    if history.joined:
        return False
    if history.ran or history.num_tokens:
        return True
    end = history.state.end
    if history.is_item:
        return False  # nobody was answered: its result says so
    return isinstance(end, Failed) or (isinstance(end, Rejected) and end.status == _CANCELLED_IN_THE_QUEUE)


def expected_tokens(history: History) -> tuple[int, int]:
    """(input, output) that an ended request must be billed."""
    end = history.state.end
    free = history.waived or history.joined
    if not history.is_item:
        free = free or (isinstance(end, Failed) and end.code == _ENGINE_FAULT)
    if free or not (history.ran or history.state.attempt > 1):
        return 0, 0
    return history.input_tokens, history.num_tokens


def _judge_open(history: History, now_ms: int, allowed: Tolerances) -> Iterator[Finding]:
    state = history.state
    if state.gap is not None and now_ms - state.last_sign_at > allowed.gap_ms:
        expected, found = state.gap
        kind = Kind.DROPPED_TOKEN if found > expected else Kind.DOUBLED_TOKEN
        yield _finding(kind, history, seen_in="inference.tokens", counted=expected, said=found)
        return
    if history.is_item and not history.ran:
        return  # it may have ended while it waited to be sent again: its result says so
    late_ms = now_ms - history.accepted_at - history.end_ms - (ITEM_GRACE_MS if history.is_item else 0)
    if late_ms > allowed.deadline_ms:
        yield _finding(Kind.PAST_DEADLINE, history, end_ms=history.end_ms, late_ms=late_ms)


def _judge_row(history: History) -> Iterator[Finding]:
    row = history.row
    if row is None:
        if must_have_row(history):
            yield _finding(
                Kind.LOST_ROW, history, missing_in="inference.usage", output_tokens=history.num_tokens
            )
        return
    if not row.sealed and len(history.rows_of) > 1:
        runs = ",".join(f"{run.slot}/{run.epoch}" for run in sorted(history.rows_of))
        yield _finding(Kind.TWO_RUNS_BILLED, history, attempt=row.attempt, runs=runs)
    elif (row.input_tokens, row.output_tokens) != (expected := expected_tokens(history)):
        yield _finding(
            Kind.BILLED_DIFFERS,
            history,
            billed_input=row.input_tokens,
            billed_output=row.output_tokens,
            input=expected[0],
            output=expected[1],
        )
    if row.tenant != history.tenant:
        yield _finding(Kind.WRONG_ROW, history, billed_to=row.tenant)


def _cost_nothing(history: History) -> Iterator[Finding]:
    row = history.row
    if row is not None and (row.input_tokens or row.output_tokens):
        yield _finding(
            Kind.BILLED_DIFFERS,
            history,
            billed_input=row.input_tokens,
            billed_output=row.output_tokens,
            input=0,
            output=0,
        )


def _finding(kind: Kind, history: History, **figures: int | str) -> Finding:
    return Finding(kind, history.name, history.tenant, figures)
