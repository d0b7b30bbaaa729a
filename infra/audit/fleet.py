"""Whether workers and admission hold anything that no request needs. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from infra.audit.findings import Figures, Finding, Kind
from infra.audit.history import History
from infra.audit.request_log import RequestLog
from infra.audit.transfers import Counted
from schemas.records import Heartbeat, WorkerStatus
from schemas.stream_state import Run


class Reservation(NamedTuple):
    """One that an admission process holds open. `end_at`: when it expires (ms of the epoch)."""

    request_id: bytes
    tenant: str
    priority: int
    tokens: int
    end_at: int


def judge_workers(heartbeats: Iterable[Heartbeat], *, idle: bool) -> Iterator[Finding]:
    """The newest life of each worker slot, by its heartbeats of the last seconds, all after the last request
    that is looked at had ended.

    A leaked block never comes back: so one moment with all of them free, or with nothing that runs, decides.
    Blocks that are cached and held by nobody count as free. `idle`: no request is open at all.
    """
    for (slot, epoch), said in _newest_lives(heartbeats):
        resting = [each for each in said if _rests(each)]
        last = said[-1]
        if resting:
            free = max(each.free_blocks for each in resting)
            if free < last.num_blocks:
                figures: Figures = {
                    "slot": slot,
                    "epoch": epoch,
                    "num_blocks": last.num_blocks,
                    "leaked": last.num_blocks - free,
                }
                yield Finding(Kind.LEAKED_BLOCK, None, None, figures)
        elif idle:
            figures = {
                "slot": slot,
                "epoch": epoch,
                "num_running": last.num_running,
                "num_waiting": sum(last.num_waiting),
            }
            yield Finding(Kind.GHOST_SEQUENCE, None, None, figures)


def counted_handoffs(heartbeats: Iterable[Heartbeat]) -> Counted:
    """By the newest life of each worker slot: the handoffs in all its heartbeats but those that some lack."""
    return {
        Run(*life): frozenset.intersection(*(frozenset(each.handoffs) for each in said))
        for life, said in _newest_lives(heartbeats)
    }


def never_rested(heartbeats: Iterable[Heartbeat]) -> list[int]:
    """The worker slots whose newest life had something that ran or waited in each of these."""
    return [slot for (slot, _), said in _newest_lives(heartbeats) if not any(map(_rests, said))]


def _newest_lives(heartbeats: Iterable[Heartbeat]) -> Iterator[tuple[tuple[int, int], list[WorkerStatus]]]:
    """Each worker slot's last epoch and what it said, in order."""
    newest: dict[int, int] = {}
    said: dict[tuple[int, int], list[WorkerStatus]] = {}
    for beat in heartbeats:
        if beat.role == "worker" and beat.worker is not None:
            newest[beat.slot] = max(beat.epoch, newest.get(beat.slot, 0))
            said.setdefault((beat.slot, beat.epoch), []).append(beat.worker)
    for life in sorted(newest.items()):
        yield life, said[life]


def _rests(worker: WorkerStatus) -> bool:
    return worker.num_running == 0 and not any(worker.num_waiting)


def judge_reservations(
    reservations: Iterable[Reservation], requests: RequestLog, now_ms: int, clock_ms: int
) -> Iterator[Finding]:
    """Held by admission some time after `requests` was read, with the usage rows of all that had ended."""
    for held in reservations:
        if not requests.has(held.request_id):
            continue
        history = requests.get(held.request_id)
        why = None
        if held.end_at + clock_ms < now_ms:
            why = "expired"
        elif history is not None and (history.is_over and not _still_told(history)):
            why = "ended"
        if why is not None:
            figures: Figures = {
                "why": why,
                "class": held.priority,
                "tokens": held.tokens,
                "end_at": held.end_at,
            }
            yield Finding(Kind.LEAKED_RESERVATION, held.request_id.hex(), held.tenant, figures)


def _still_told(history: History) -> bool:
    """An end without a row settles nothing: that is a finding of its own."""
    return history.ran and history.row is None
