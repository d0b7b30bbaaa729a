"""One open batch request: where it stands, and when to look at it again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest
from schemas.stream_state import Run, StreamState
from streams.ledger.batch_records import BatchItem, Source

FIRST_BACKOFF_MS = 1_000
MAX_BACKOFF_MS = 60_000


class Phase(Enum):
    WAITING = auto()  # to be sent at `due_at`
    SENT = auto()  # with admission, or running
    RETRYING = auto()  # a Retry is on its way back
    FAILING = auto()  # a Failed is on its way back
    ENDED = auto()


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.SENT, Phase.ENDED}),
    Phase.SENT: frozenset(Phase),
    Phase.RETRYING: frozenset({Phase.WAITING, Phase.SENT, Phase.ENDED}),
    Phase.FAILING: frozenset({Phase.WAITING, Phase.SENT, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(slots=True)
class OpenRequest:
    """`sources` has more than one where a producer wrote the same request twice. Times are ms;
    `sign_ms` is on the fleet's log clock. `since` is where the reply partition must be read from."""

    item: BatchItem
    state: StreamState
    since: int
    sources: list[Source]
    phase: Phase = Phase.WAITING
    due_at: int = 0
    backoff_ms: int = FIRST_BACKOFF_MS
    sent_offset: int | None = None
    resends: int = 0
    unanswered_at: int | None = None
    sign_ms: int = 0
    cancelled: set[Run] = field(default_factory=set)
    ran: bool = False

    def to_send(self, reply_partition: int, owner_epoch: int, end_ms: int) -> InferenceRequest:
        """The record for inference.requests, with all tokens that it has so far."""
        return InferenceRequest(
            request_id=self.item.request_id,
            attempt=self.state.attempt,
            tenant=self.item.source.tenant,
            priority=PriorityClass.BATCH,
            model=self.item.model.spec.id,
            prompt_token_ids=self.item.prompt_token_ids,
            output_token_ids=list(self.state.token_ids),
            sampling=self.item.sampling,
            reply_partition=reply_partition,
            owner_epoch=owner_epoch,
            accepted_at=self.item.accepted_at,
            end_ms=end_ms,
            # A day is time enough for the model that was asked for.
            allow_fallback=False,
        )

    def new_strays(self) -> list[Run]:
        """Runs to be cancelled, each once."""
        new = self.state.strays - self.cancelled
        self.cancelled |= new
        return sorted(new)

    def transition_to(self, phase: Phase) -> None:
        """Raises RuntimeError for a step that is none."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"batch request {self.item.request_id.hex()}: {self.phase} to {phase}")
        self.phase = phase

    def back_off(self, now_ms: int, at_least_ms: int) -> None:
        """Waits before it is sent again, longer each time."""
        self.due_at = now_ms + max(self.backoff_ms, at_least_ms)
        self.backoff_ms = min(self.backoff_ms * 2, MAX_BACKOFF_MS)
        self.resends = 0
        if self.phase is not Phase.WAITING:
            self.transition_to(Phase.WAITING)
