"""One transfer at one side: where it stands in the table, until when, and what it holds."""

from dataclasses import dataclass

from schemas.priority import PriorityClass
from schemas.stream_state import Run
from workers.handoff.states import TERMINAL, Action, Event, State, Table

# How long (s) a decode run's heartbeats tell of a handoff that is over: others may miss one or two.
TOLD_S = 2.0


@dataclass(slots=True)
class Transfer:
    """Times in seconds of the caller's clock. `holds` while blocks are kept, or waited for, because of it."""

    transfer_id: bytes
    request_id: bytes
    attempt: int
    priority: PriorityClass
    peer: Run
    reserve_deadline: float
    deadline: float
    state: State = State.OFFERED
    holds: bool = True
    reason: str = ""
    ended_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    @property
    def can_be_forgotten(self) -> bool:
        return self.is_over and not self.holds

    def move(self, table: Table, event: Event, now: float, reason: str) -> tuple[Action, ...]:
        """Goes where the table says; returns what is then done. The first end's reason stays."""
        row = table[self.state][event]
        was_over = self.is_over
        self.state = row.state
        if self.is_over and not was_over:
            self.ended_at, self.reason = now, reason
        return row.actions

    def due(self, now: float) -> Event | None:
        """The deadline that has passed, the later one first."""
        if self.is_over:
            return None
        if now >= self.deadline:
            return Event.DEADLINE
        if self.state is State.OFFERED and now >= self.reserve_deadline:
            return Event.RESERVE_DEADLINE
        return None

    def next_due(self) -> float | None:
        """When `due` says something next."""
        if self.is_over:
            return None
        return min(self.reserve_deadline, self.deadline) if self.state is State.OFFERED else self.deadline


class Over:
    """Runs that are over: an offer may come later than the news of its sender's end. Pure."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}  # the highest of each slot

    def note(self, run: Run) -> None:
        self._epochs[run.slot] = max(run.epoch, self._epochs.get(run.slot, run.epoch))

    def __contains__(self, run: Run) -> bool:
        return run.epoch <= self._epochs.get(run.slot, -1)


class Ended:
    """Transfers that are over and hold nothing, remembered for `seconds`: so that a message that comes late
    or twice does not begin one anew. Pure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[bytes, float] = {}  # in the order of expiry

    def note(self, transfer_id: bytes, now: float) -> None:
        """`now` never goes back."""
        self.forget(now)
        self._until[transfer_id] = now + self._seconds

    def forget(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._until
