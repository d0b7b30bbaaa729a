"""Whether workers and admission hold anything that no request needs. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from infra.audit.findings import Figures, Finding, Kind
from infra.audit.history import History
from infra.audit.request_log import RequestLog
from infra.audit.transfers import Counted
from schemas.records import Heartbeat
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
    newest: dict[int, int] = {}
    beats: dict[tuple[int, int], list[Heartbeat]] = {}
    for beat in heartbeats:
        if beat.role == "worker" and beat.worker is not None:
            newest[beat.slot] = max(beat.epoch, newest.get(beat.slot, 0))
            beats.setdefault((beat.slot, beat.epoch), []).append(beat)
    for slot, epoch in sorted(newest.items()):
        said = [beat.worker for beat in beats[slot, epoch] if beat.worker is not None]
        resting = [each for each in said if each.num_running == 0 and not any(each.num_waiting)]
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
    newest: dict[int, Run] = {}
    found: dict[Run, frozenset[bytes]] = {}
    for beat in heartbeats:
        if beat.role == "worker" and beat.worker is not None:
            run, handoffs = Run(beat.slot, beat.epoch), frozenset(beat.worker.handoffs)
            newest[beat.slot] = max(run, newest.get(beat.slot, run))
            found[run] = found.get(run, handoffs) & handoffs
    return {run: found[run] for run in newest.values()}


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
