"""Places at decode slots for requests whose prompts are computed elsewhere, as this process counts them.
Pure.

A place is taken before the Dispatch to prefill goes out, and given back when the decode slot's heartbeat
counts the request itself, when the request ends, is refused or tried again, when one of the two runs is gone,
or at its end: so the router never holds more than what may still come.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.records import InferenceRequest
from streams.admission.in_flight import InFlight
from streams.admission.worker import Worker


@dataclass(frozen=True, slots=True)
class Reservation:
    """Of one attempt of a request, until `expires_at` (ms of the epoch)."""

    request_id: bytes
    attempt: int
    prefill: Worker
    decode: Worker
    expires_at: int


class Reservations:
    """By request_id: the newest attempt's."""

    def __init__(self) -> None:
        self._held: dict[bytes, Reservation] = {}
        self._expiry: deque[Reservation] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def take(
        self, prefill: Worker, decode: Worker, request: InferenceRequest, expected: int, expires_at: int
    ) -> None:
        """A place at `decode` for the request with `expected` output tokens; an earlier attempt's is free."""
        request_id = request.request_id
        self.release(request_id)
        held = Reservation(request_id, request.attempt, prefill, decode, expires_at)
        self._held[request_id] = held
        self._expiry.append(held)
        decode.reserve(request_id, InFlight(request.priority, decode.blocks_for(request, expected), 0))

    def release(self, request_id: bytes, attempt: int | None = None) -> None:
        """Fine for one that has none. `attempt`: only that one's."""
        held = self._held.get(request_id)
        if held is not None and attempt in (None, held.attempt):
            self._free(held)

    def retain(self, workers: Mapping[int, Worker]) -> None:
        """Gives back those of runs that are not among the live `workers`, by slot."""
        for held in list(self._held.values()):
            if any(workers.get(run.slot) is not run for run in (held.prefill, held.decode)):
                self._free(held)

    def expire(self, now: int) -> None:
        """Call it often."""
        while self._expiry and self._expiry[0].expires_at <= now:
            held = self._expiry.popleft()
            if self._held.get(held.request_id) is held:
                self._free(held)

    def _free(self, held: Reservation) -> None:
        del self._held[held.request_id]
        held.decode.release(held.request_id)
        # The prefill run did what it was asked for, or is asked no more.
        held.prefill.suspects.discard(held.request_id)
