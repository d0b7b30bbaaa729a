"""What this run has taken and not ended, and which dispatches are worth taking. Pure: time is an argument."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schemas.headers import ReplyTo
from schemas.records import Cancellation, Dispatch, InferenceRequest
from workers.attempt_memory import AttemptMemory
from workers.cancellations import Cancellations
from workers.request import FinishReason, Request
from workers.request_factory import make_request, request_error

REMEMBER_ENDED_S = 600.0


class End(NamedTuple):
    """How a request ended; `message` says what was wrong when the reason is ERROR.

    `text_length` is where a stop string cuts the text of the whole output, in characters.
    """

    reason: FinishReason
    message: str = ""
    text_length: int | None = None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its dispatch and its end, as the event loop sees it.

    `request` belongs to the engine thread once it was added there; here it is an identity. Times in seconds
    of the monotonic clock. `num_output_tokens` counts what was handed to the outbox, over all attempts.
    """

    request: Request
    tenant: str
    accepted_at: int
    traceparent: str | None
    arrived: float
    num_output_tokens: int
    last_sign: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def first_token_ms(self) -> int | None:
        """From the dispatch to the first token; None before it."""
        return None if self.first_token is None else int((self.first_token - self.arrived) * 1_000)

    @property
    def reply_to(self) -> ReplyTo:
        return ReplyTo(self.request.request_id, self.request.attempt, self.request.reply_partition)


class LiveRequests:
    def __init__(self, slot: int, epoch: int, model: str, vocab_size: int) -> None:
        self._slot = slot
        self._epoch = epoch
        self._model = model
        self._vocab_size = vocab_size
        self._live: dict[bytes, LiveRequest] = {}
        self._ended = AttemptMemory(REMEMBER_ENDED_S)
        self._cancellations = Cancellations(slot, epoch)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def of(self, request: Request) -> LiveRequest | None:
        """The live request that `request` is; None when a higher attempt took its place."""
        live = self._live.get(request.request_id)
        return live if live is not None and live.request is request else None

    def on_dispatch(
        self, dispatch: Dispatch, now: float, traceparent: str | None = None
    ) -> tuple[LiveRequest, End | None] | None:
        """Takes a dispatch: the live request, and its end if it must not even start.

        None for what is not ours to answer: another run's, a double, an attempt that was overtaken or has
        ended here already.
        """
        wanted = dispatch.request
        if (dispatch.slot, dispatch.epoch) != (self._slot, self._epoch):
            return None
        known = self._live.get(wanted.request_id)
        if known is not None and known.request.attempt >= wanted.attempt:
            return None
        if self._ended.covers(wanted.request_id, wanted.attempt, now):
            return None
        error = request_error(wanted, self._model, self._vocab_size)
        live = LiveRequest(
            request=make_request(dispatch, is_valid=not error),
            tenant=wanted.tenant,
            accepted_at=wanted.accepted_at,
            traceparent=traceparent,
            arrived=now,
            num_output_tokens=len(wanted.output_token_ids),
            last_sign=now,
        )
        self._live[wanted.request_id] = live
        if self._cancellations.covers(wanted.request_id, wanted.attempt, now):
            return live, End(FinishReason.CANCELLED)
        return live, End(FinishReason.ERROR, error) if error else None

    def is_cancelled(self, wanted: InferenceRequest, now: float) -> bool:
        """Whether it was cancelled before it came."""
        return self._cancellations.covers(wanted.request_id, wanted.attempt, now)

    def on_cancellation(self, cancellation: Cancellation, now: float) -> bool:
        """True if a live attempt is meant and must be stopped; else it is remembered if it may mean one."""
        if not self._cancellations.note(cancellation, now):
            return False
        live = self._live.get(cancellation.request_id)
        return live is not None and live.request.attempt <= cancellation.attempt

    def on_end(self, live: LiveRequest, now: float) -> None:
        """Forgets a request that ended, but for the fact that it did."""
        del self._live[live.request.request_id]
        self._ended.note(live.request.request_id, live.request.attempt, now)
