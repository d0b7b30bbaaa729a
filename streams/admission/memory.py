"""What became of each request, so that one sent again is neither run twice nor left without an answer."""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from streams.admission.fair_queue import QueuedRequest
from streams.admission.in_flight import InFlight
from streams.admission.pairing import Route

# Owners send again within seconds.
REMEMBER_MS = 60_000


class Phase(Enum):
    QUEUED = auto()
    ASSIGNED = auto()  # a worker is chosen, the Dispatch not acked yet
    DISPATCHED = auto()


@dataclass(slots=True)
class Known:
    """The newest attempt of a request. The run is (slot, epoch), -1 while it is queued; `model` serves it.
    `prefill` is another run that computes its prompt, if there is one.

    The time to its first token as predicted: `predicted_ms` when it came, from then on; `prefill_ms` when its
    worker was chosen, from then on. It waited for `queued_ms`. `granted_max_tokens` is None where it is as
    asked.
    """

    attempt: int
    phase: Phase
    queued: QueuedRequest | None
    model: str = ""
    slot: int = -1
    epoch: int = -1
    ended: bool = False
    forget_at: int = 0
    predicted_cached_tokens: int = 0
    granted_max_tokens: int | None = None
    queued_ms: int = 0
    predicted_ms: float | None = None
    prefill_ms: float | None = None
    prefill: tuple[int, int] | None = None


class RequestMemory:
    """Holds what is queued, and what was dispatched for a minute after."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self._expiry: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, request_id: bytes) -> Known | None:
        return self._known.get(request_id)

    def queued(self, item: QueuedRequest) -> None:
        """The attempt waits; it replaces an earlier one."""
        request = item.request
        known = Known(request.attempt, Phase.QUEUED, item, request.model)
        self._known[request.request_id] = known
        granted = request.sampling.max_tokens
        if item.arrival is not None and granted != item.arrival.max_tokens:
            known.granted_max_tokens = granted

    def assigned(
        self, item: QueuedRequest, route: Route, entry: InFlight, now: int, prefill_ms: float | None = None
    ) -> None:
        """A worker is chosen for what was queued; `prefill_ms` predicts the time to its first token there."""
        known = self._known[item.request.request_id]
        known.phase, known.queued = Phase.ASSIGNED, None
        known.slot, known.epoch, known.forget_at = route.run.slot, route.run.epoch, now + REMEMBER_MS
        known.prefill = None if route.decode is None else (route.worker.slot, route.worker.epoch)
        known.predicted_cached_tokens = entry.cached_tokens
        known.queued_ms, known.prefill_ms = max(0, now - item.queued_at), prefill_ms
        if item.arrival is not None:
            known.predicted_ms = item.arrival.predicted_ttft_ms
        self._expiry.append((known.forget_at, item.request.request_id))

    def dispatched(self, request_id: bytes, attempt: int) -> Known | None:
        """The Dispatch was acked; what is known if this is the newest attempt."""
        known = self._known.get(request_id)
        if known is not None and known.attempt == attempt:
            known.phase = Phase.DISPATCHED
            return known
        return None

    def ended(self, request_id: bytes, attempt: int, slot: int, epoch: int) -> bool:
        """A usage row names this run: True the first time, if it is the one that was chosen here."""
        known = self._known.get(request_id)
        if known is None or known.ended or known.attempt != attempt:
            return False
        if (known.slot, known.epoch) != (slot, epoch) != known.prefill:
            return False
        known.ended = True
        return True

    def forget(self, request_id: bytes, attempt: int | None = None) -> None:
        """Forgets the request, or only if `attempt` is its newest."""
        known = self._known.get(request_id)
        if known is not None and attempt in (None, known.attempt):
            del self._known[request_id]

    def expire(self, now: int) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            forget_at, request_id = self._expiry.popleft()
            known = self._known.get(request_id)
            if known is not None and known.queued is None and known.forget_at == forget_at:
                del self._known[request_id]
