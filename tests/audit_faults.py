"""Faults to be put into a recorded log, of each kind that the audit names. `victim` is a request of one
attempt, whose client read all of it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from infra.audit.findings import Kind
from infra.audit.fleet import Reservation
from schemas import topics
from schemas.records import Cancellation, Dispatched, InferenceRequest, Tokens, Usage
from streams.ledger.billing import version
from tests.audit_recording import Recording, completion_of, without_chunk_token

Alter = Callable[[Recording, bytes], None]


def asked_by(recording: Recording, victim: bytes) -> str:
    return recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)[0].tenant


def lose_usage(recording: Recording, victim: bytes) -> None:
    recording.change(topics.USAGE, lambda r: None if isinstance(r, Usage) and r.request_id == victim else r)
    del recording.rows[victim.hex()]


def lose_row(recording: Recording, victim: bytes) -> None:
    del recording.rows[victim.hex()]


def double_row(recording: Recording, victim: bytes) -> None:
    rows = recording.rows[victim.hex()]
    rows.append(rows[0]._replace(tenant="other"))


def keep_an_old_row(recording: Recording, victim: bytes) -> None:
    rows = recording.rows[victim.hex()]
    rows[0] = rows[0]._replace(version=rows[0].version - 1)


def bill_what_was_not_asked(recording: Recording, victim: bytes) -> None:
    stranger = bytes(16)
    (row,) = recording.rows[victim.hex()]
    recording.rows[stranger.hex()] = [row._replace(request_id=stranger.hex())]


def bill_one_more(recording: Recording, victim: bytes) -> None:
    def one_more(record: Any) -> Any:
        if isinstance(record, Usage) and record.request_id == victim:
            return replace(record, output_tokens=record.output_tokens + 1)
        return record

    recording.change(topics.USAGE, one_more)
    (usage,) = recording.all(topics.USAGE, Usage, lambda u: u.request_id == victim)
    (row,) = recording.rows[victim.hex()]
    recording.rows[victim.hex()] = [row._replace(version=version(usage))]


def drop_a_token(recording: Recording, victim: bytes) -> None:
    recording.change(topics.TOKENS, lambda r: without_chunk_token(r, victim, 7, twice=False))


def drop_the_last_token(recording: Recording, victim: bytes) -> None:
    last = completion_of(recording, victim).output_tokens - 1
    recording.change(topics.TOKENS, lambda r: without_chunk_token(r, victim, last, twice=False))


def double_a_token(recording: Recording, victim: bytes) -> None:
    recording.change(topics.TOKENS, lambda r: without_chunk_token(r, victim, 7, twice=True))


def client_got(recording: Recording, victim: bytes, change: int) -> None:
    (record,) = recording.clients[victim]
    recording.clients[victim] = [replace(record, num_tokens=record.num_tokens + change)]


def client_got_another(recording: Recording, victim: bytes) -> None:
    ids = [
        chunk.token_ids
        for r in recording.all(topics.TOKENS, Tokens)
        for chunk in r.chunks
        if chunk.request_id == victim
    ]
    token_ids = list(chain(*ids))
    token_ids[3] += 1
    (record,) = recording.clients[victim]
    recording.clients[victim] = [replace(record, token_ids=token_ids)]


def client_was_refused(recording: Recording, victim: bytes) -> None:
    (record,) = recording.clients[victim]
    recording.clients[victim] = [replace(record, status=429, num_tokens=0, end=None)]


def client_heard_another_end(recording: Recording, victim: bytes) -> None:
    (record,) = recording.clients[victim]
    recording.clients[victim] = [replace(record, end="stop")]


def bill_a_second_run(recording: Recording, victim: bytes) -> None:
    (usage,) = recording.all(topics.USAGE, Usage, lambda u: u.request_id == victim)
    assert usage.epoch is not None
    # The row that counts stays, so that the table is in order.
    recording.append(topics.USAGE, replace(usage, epoch=usage.epoch + 1, output_tokens=1))


def retry_what_ended(recording: Recording, victim: bytes) -> None:
    (asked,) = recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)
    recording.append(topics.REQUESTS, replace(asked, attempt=2))


def dispatch_what_ended(recording: Recording, victim: bytes) -> None:
    (asked,) = recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)
    late = Dispatched(victim, 2, asked.owner_epoch, 0, 10**6, "simulated")
    recording.append(topics.TOKENS, late, asked.reply_partition)


def end_twice(recording: Recording, victim: bytes) -> None:
    (asked,) = recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)
    recording.append(topics.TOKENS, completion_of(recording, victim), asked.reply_partition)


def lose_the_end(recording: Recording, victim: bytes) -> None:
    """And long after its time nobody has said one."""
    end = completion_of(recording, victim)
    recording.change(topics.TOKENS, lambda r: None if r == end else r)
    recording.clients.clear()
    recording.now_ms += 10**9


def lose_the_end_alone(recording: Recording, victim: bytes) -> None:
    end = completion_of(recording, victim)
    recording.change(topics.TOKENS, lambda r: None if r == end else r)


def cancel_early(recording: Recording, victim: bytes) -> None:
    (asked,) = recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)
    last = max(
        logged.timestamp
        for logged in recording.log[topics.TOKENS]
        if isinstance(logged.record, Tokens) and victim in logged.record.request_ids
    )
    cancel = Cancellation(victim, 1, asked.tenant, "disconnected")
    recording.append(topics.CANCELLATIONS, cancel, timestamp=last - 10_000)


def leave_reserved(recording: Recording, victim: bytes) -> None:
    recording.reservations.append(
        Reservation(victim, asked_by(recording, victim), 0, 43, recording.now_ms + 60_000)
    )


def leave_reserved_too_long(recording: Recording, victim: bytes) -> None:
    """Of what is not known here: nobody has heard of it, but its time is over."""
    recording.reservations.append(
        Reservation(victim, asked_by(recording, victim), 0, 43, recording.now_ms - 60_000)
    )


def leak_a_block(recording: Recording, victim: bytes) -> None:
    recording.heartbeats = [
        replace(beat, worker=replace(beat.worker, free_blocks=beat.worker.free_blocks - 1))
        if beat.worker is not None and beat.slot == 0
        else beat
        for beat in recording.heartbeats
    ]


def run_a_ghost(recording: Recording, victim: bytes) -> None:
    recording.heartbeats = [
        replace(beat, worker=replace(beat.worker, num_running=1)) if beat.worker is not None else beat
        for beat in recording.heartbeats
    ]


FAULTS: list[tuple[Kind, Alter]] = [
    (Kind.LOST_ROW, lose_usage),
    (Kind.LOST_ROW, lose_row),
    (Kind.DOUBLED_ROW, double_row),
    (Kind.WRONG_ROW, keep_an_old_row),
    (Kind.BILLED_DIFFERS, bill_one_more),
    (Kind.DROPPED_TOKEN, lambda r, victim: client_got(r, victim, -1)),
    (Kind.DOUBLED_TOKEN, lambda r, victim: client_got(r, victim, +1)),
    (Kind.WRONG_TOKEN, client_got_another),
    (Kind.REFUSED_BUT_BILLED, client_was_refused),
    (Kind.END_DIFFERS, client_heard_another_end),
    (Kind.TWO_RUNS_BILLED, bill_a_second_run),
    (Kind.RETRIED_AFTER_END, retry_what_ended),
    (Kind.RETRIED_AFTER_END, dispatch_what_ended),
    (Kind.TWO_ENDS, end_twice),
    (Kind.PAST_DEADLINE, lose_the_end),
    (Kind.NO_END, lose_the_end_alone),
    (Kind.DECODED_AFTER_CANCEL, cancel_early),
    (Kind.LEAKED_RESERVATION, leave_reserved),
    (Kind.LEAKED_RESERVATION, leave_reserved_too_long),
]
