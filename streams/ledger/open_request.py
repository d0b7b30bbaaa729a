"""One open batch request: where it stands, and when to look at it again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from schemas.api.errors import ApiError
from schemas.priority import PriorityClass
from schemas.records import Cancellation, InferenceRequest
from schemas.sampling import TokenLogprobs
from schemas.stream_state import Effect, Run, StreamState
from schemas.token_records import TokenChunk
from streams.ledger.batch_actions import CancelRun
from streams.ledger.batch_item import BatchItem
from streams.ledger.open_line import OpenLine

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
    """`item` is the line, or one choice of it. Times are ms; `sign_ms` is on the fleet's log clock.
    `logprobs` are those of the state's tokens, as far as they were told. `stopped`: how it ends unless an
    answer comes first; it was cancelled at `stopped_at`. `oversized`: no record of the log holds it as it is.
    """

    item: BatchItem
    state: StreamState
    line: OpenLine
    phase: Phase = Phase.WAITING
    due_at: int = 0
    backoff_ms: int = FIRST_BACKOFF_MS
    sent_offset: int | None = None
    resends: int = 0
    unanswered_at: int | None = None
    sign_ms: int = 0
    cancelled: set[Run] = field(default_factory=set)
    ran: bool = False
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stopped: ApiError | None = None
    stopped_at: int = 0
    oversized: bool = False

    def apply_chunk(self, run: Run, chunk: TokenChunk, timestamp_ms: int) -> Effect:
        """Folds it; of what counts the log probabilities are kept, where they are asked for."""
        return fold_chunk(self.state, self.logprobs, run, chunk, timestamp_ms)

    def to_send(self, reply_partition: int, owner_epoch: int, default_end_ms: int) -> InferenceRequest:
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
            end_ms=self.item.end_ms or default_end_ms,
            # A day is time enough for the model that was asked for.
            allow_fallback=False,
        )

    def stray_stops(self) -> list[CancelRun]:
        """For the runs to be cancelled, each once."""
        new = self.state.strays - self.cancelled
        self.cancelled |= new
        rid, attempt, tenant = self.item.request_id, self.state.attempt, self.item.source.tenant
        return [
            CancelRun(Cancellation(rid, attempt, tenant, "stray", run.slot, run.epoch)) for run in sorted(new)
        ]

    def stop(self, reason: str, *, behind_request: bool) -> CancelRun:
        """For whatever has it now."""
        rid, attempt, tenant = self.item.request_id, self.state.attempt, self.item.source.tenant
        return CancelRun(Cancellation(rid, attempt, tenant, reason), behind_request)

    def transition_to(self, phase: Phase) -> None:
        """Raises RuntimeError for a step that is none."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"batch request {self.item.request_id.hex()}: {self.phase} to {phase}")
        self.phase = phase

    def back_off(self, now_ms: int, at_least_ms: int) -> None:
        """Waits before it is sent again, longer each time, and never so long that a limit that was raised or
        a budget is of no use to it."""
        self.due_at = now_ms + max(self.backoff_ms, min(at_least_ms, MAX_BACKOFF_MS))
        self.backoff_ms = min(self.backoff_ms * 2, MAX_BACKOFF_MS)
        self.resends = 0
        if self.phase is not Phase.WAITING:
            self.transition_to(Phase.WAITING)

    def hurry(self, due_at: int) -> None:
        """Waits until then at most."""
        if self.phase is Phase.WAITING:
            self.due_at, self.backoff_ms = min(self.due_at, due_at), FIRST_BACKOFF_MS


def fold_chunk(
    state: StreamState,
    logprobs: list[TokenLogprobs | None],
    run: Run,
    chunk: TokenChunk,
    timestamp_ms: int,
) -> Effect:
    """`state.apply_chunk`, which keeps no log probabilities: those of the tokens that count now go behind
    `logprobs`."""
    before = len(state.token_ids)
    effect = state.apply_chunk(run, chunk, timestamp_ms)
    if chunk.logprobs and effect is Effect.TOKENS:
        logprobs += [None] * (before - len(logprobs))
        logprobs += chunk.logprobs[before - chunk.position :]
    return effect
