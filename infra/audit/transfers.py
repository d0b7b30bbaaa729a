"""Whether each transfer of KV came to an end at both sides and left nothing behind. Pure.

By inference.decode, and by who is alive: what a side does when the other one's run is over it need not say
(workers/handoff/PROTOCOL.md), so whether a transfer has ended is judged only while both runs live.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from infra.audit.checks import Tolerances
from infra.audit.findings import Figures, Finding, Kind
from infra.audit.history import History
from infra.audit.request_log import RequestLog
from schemas.records import Handoff, Offer, Reserved, TransferEnded
from schemas.stream_state import Run
from workers.handoff.ended_messages import UNKNOWN
from workers.handoff.states import State

# The runs that live, and of which requests each counts a handoff.
Counted = Mapping[Run, AbstractSet[bytes]]


@dataclass(frozen=True, slots=True)
class Offered:
    """`at`: ms of the epoch, by the broker's clock."""

    request_id: bytes
    attempt: int
    prefill: Run
    decode: Run
    at: int
    lease_ms: int


@dataclass(slots=True)
class TransferHistory:
    """What the log says of one transfer. `offered` None: its Offer lies before the time that is looked at.

    `num_reserved` blocks were named to prefill. `ends`: what each run said that it became. `closed_by` said
    that no write begins any more, `may_land_by` that one may still land.
    """

    offered: Offered | None = None
    num_reserved: int = 0
    is_handed_off: bool = False
    ends: dict[Run, set[str]] = field(default_factory=dict)
    closed_by: set[Run] = field(default_factory=set)
    may_land_by: set[Run] = field(default_factory=set)

    @property
    def adopted_by(self) -> set[Run]:
        return {run for run, ends in self.ends.items() if State.ADOPTED in ends}

    def open_sides(self, offered: Offered) -> list[str]:
        """Those of which the log does not say that it is over there."""
        closed = offered.prefill in self.closed_by
        # Where prefill broke off decode only waits; where it named no blocks it may have heard of none.
        silent = closed and (offered.prefill in self.may_land_by or not self.num_reserved)
        over = {
            "prefill": closed or offered.decode in self.adopted_by,
            "decode": offered.decode in self.ends or silent,
        }
        return [side for side, is_over in over.items() if not is_over]

    def is_stranded(self, offered: Offered) -> bool:
        """Decode gave it up, and nobody has told it that it may use the blocks again."""
        gave_up = offered.decode in self.ends and offered.decode not in self.adopted_by
        told = self.is_handed_off or offered.prefill in self.closed_by
        return gave_up and self.num_reserved > 0 and not told


class TransferLog:
    """Takes inference.decode, in any order of its partitions: an Offer lies in another one than its answers.
    Of requests that `requests` has, which are all read."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self._transfers: dict[bytes, TransferHistory] = {}

    def __len__(self) -> int:
        return sum(history.offered is not None for history in self._transfers.values())

    @property
    def num_adopted(self) -> int:
        return sum(bool(history.adopted_by) for history in self._transfers.values())

    def on_record(self, record: object, timestamp_ms: int) -> None:
        if isinstance(record, Offer):
            request = record.request
            if (history := self._of(record.transfer_id, request.request_id)) is not None:
                history.offered = history.offered or Offered(
                    request.request_id,
                    request.attempt,
                    Run(record.prefill_slot, record.prefill_epoch),
                    Run(record.decode_slot, record.decode_epoch),
                    timestamp_ms,
                    record.lease_ms,
                )
        elif isinstance(record, Reserved | Handoff | TransferEnded) and (
            history := self._of(record.transfer_id, record.request_id)
        ):
            if isinstance(record, Reserved):
                history.num_reserved = len(record.block_ids)
            elif isinstance(record, Handoff):
                history.is_handed_off = True
            else:
                _on_ended(history, record)

    def judge(self, counted: Counted, now_ms: int, allowed: Tolerances) -> Iterator[Finding]:
        """`counted` was read after inference.decode, which was read up to `now_ms`."""
        adopted: dict[tuple[Run, bytes, int], bytes] = {}
        for transfer_id, history in self._transfers.items():
            if (offered := history.offered) is None:
                continue
            request = self._requests.get(offered.request_id)
            if request is None:
                continue
            about = _About(transfer_id, offered, request)
            yield from _judge_words(history, about)
            if offered.decode in history.adopted_by:
                before = adopted.setdefault(
                    (offered.decode, offered.request_id, offered.attempt), transfer_id
                )
                if before != transfer_id:
                    yield about.finding(Kind.ADOPTED_TWICE, other_transfer=before.hex())
            if counted.keys() >= {offered.prefill, offered.decode} and about.late_ms(now_ms, allowed) > 0:
                yield from _judge_end(history, about, now_ms)

    def counted_too_long(self, counted: Counted, answered_up_to: int) -> Iterator[Finding]:
        """Handoffs that a worker counts, of requests that had ended by `answered_up_to`: `counted` was read
        some time later, and a worker counts what came for 2 s."""
        for run, request_ids in counted.items():
            for request_id in sorted(request_ids):
                request = self._requests.get(request_id)
                if request is None or not request.is_over or (request.ended_at or 0) > answered_up_to:
                    continue
                figures: Figures = {"slot": run.slot, "epoch": run.epoch}
                yield Finding(Kind.LEAKED_HANDOFF, request.name, request.tenant, figures)

    def _of(self, transfer_id: bytes, request_id: bytes) -> TransferHistory | None:
        if self._requests.get(request_id) is None:
            return None
        return self._transfers.setdefault(transfer_id, TransferHistory())


@dataclass(frozen=True, slots=True)
class _About:
    """Whose a finding is."""

    transfer_id: bytes
    offered: Offered
    request: History

    def late_ms(self, now_ms: int, allowed: Tolerances) -> int:
        """How long both sides should have ended it: at its lease's end, or with its request."""
        due = self.offered.at + self.offered.lease_ms
        if self.request.is_over and self.request.ended_at is not None:
            due = min(due, self.request.ended_at)
        return now_ms - due - allowed.transfer_ms

    def finding(self, kind: Kind, **figures: int | str) -> Finding:
        offered = self.offered
        runs = {"prefill": offered.prefill, "decode": offered.decode}
        named = {name: f"{run.slot}/{run.epoch}" for name, run in runs.items()}
        told: Figures = {"transfer": self.transfer_id.hex(), **named, **figures}
        return Finding(kind, self.request.name, self.request.tenant, told)


def _judge_words(history: TransferHistory, about: _About) -> Iterator[Finding]:
    """What holds whoever lives."""
    decode = about.offered.decode
    for run, ends in history.ends.items():
        if len(ends) > 1:
            said = ",".join(sorted(ends))
            yield about.finding(Kind.TRANSFER_ENDS_DIFFER, run=f"{run.slot}/{run.epoch}", said=said)
    if others := history.adopted_by - {decode}:
        runs = ",".join(f"{run.slot}/{run.epoch}" for run in sorted(others))
        yield about.finding(Kind.ADOPTED_TWICE, also_by=runs)
    if decode in history.adopted_by and not history.is_handed_off:
        yield about.finding(Kind.ADOPTED_UNWRITTEN)


def _judge_end(history: TransferHistory, about: _About, now_ms: int) -> Iterator[Finding]:
    """Of one that should have ended."""
    offered = about.offered
    if sides := history.open_sides(offered):
        age_ms = now_ms - offered.at
        yield about.finding(
            Kind.OPEN_TRANSFER, open_at=",".join(sides), age_ms=age_ms, lease_ms=offered.lease_ms
        )
    if history.is_stranded(offered):
        yield about.finding(Kind.STRANDED_BLOCKS, blocks=history.num_reserved)


def _on_ended(history: TransferHistory, told: TransferEnded) -> None:
    run = Run(told.from_slot, told.from_epoch)
    if told.reason != UNKNOWN:
        history.ends.setdefault(run, set()).add(told.state)
    if told.writes_closed:
        history.closed_by.add(run)
    if told.may_land:
        history.may_land_by.add(run)
