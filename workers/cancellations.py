"""Which requests nobody wants any more: those asked about now, and those that may still come."""

from schemas.records import Cancellation
from workers.attempt_memory import AttemptMemory

REMEMBER_S = 60.0


class Cancellations:
    """All cancellations of the fleet, as far as they can mean this run. Pure."""

    def __init__(self, slot: int, epoch: int) -> None:
        self._slot = slot
        self._epoch = epoch
        self._memory = AttemptMemory(REMEMBER_S)

    def note(self, cancellation: Cancellation, now: float) -> bool:
        """Remembers it for dispatches to come. False if it is about another run and means nothing here."""
        run = (cancellation.slot, cancellation.epoch)
        if run != (None, None) and run != (self._slot, self._epoch):
            return False
        self._memory.note(cancellation.request_id, cancellation.attempt, now)
        return True

    def covers(self, request_id: bytes, attempt: int, now: float) -> bool:
        return self._memory.covers(request_id, attempt, now)
