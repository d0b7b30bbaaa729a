"""What this run has taken and not ended, and which dispatches are worth taking. Pure: time is an argument."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schemas.headers import ReplyTo
from schemas.priority import PriorityClass
from schemas.records import Cancellation, Dispatch, InferenceRequest
from workers.attempt_memory import AttemptMemory
from workers.cancellations import Cancellations
from workers.request import FinishReason, Request

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
        error = self._error(wanted)
        live = LiveRequest(
            request=Request(
                request_id=wanted.request_id,
                attempt=wanted.attempt,
                priority=PriorityClass.BATCH if error else PriorityClass(wanted.priority),
                prompt_token_ids=wanted.prompt_token_ids,
                sampling=wanted.sampling,
                reply_partition=wanted.reply_partition,
                output_token_ids=list(wanted.output_token_ids),
                expected_output_tokens=dispatch.expected_output_tokens,
                tenant=wanted.tenant,
            ),
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

    def _error(self, wanted: InferenceRequest) -> str:
        """What would break the engine, or make it serve something else than was asked for."""
        sampling = wanted.sampling
        if wanted.model != self._model:
            return f"model: this worker serves {self._model!r}, not {wanted.model!r}"
        if wanted.priority not in list(PriorityClass):
            return f"priority: no class is called {wanted.priority}"
        for name, ids in (("prompt", wanted.prompt_token_ids), ("output", wanted.output_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                return f"{name}_token_ids: ids must be 0 to {self._vocab_size - 1}"
        if sampling.max_tokens < 1:
            return f"max_tokens: must be at least 1, got {sampling.max_tokens}"
        # Written so that NaN fails too.
        if not 0.0 <= sampling.temperature < float("inf"):
            return f"temperature: must be 0 or more, got {sampling.temperature}"
        if not 0.0 < sampling.top_p <= 1.0:
            return f"top_p: must be above 0 and at most 1, got {sampling.top_p}"
        if sampling.top_k < 0:
            return f"top_k: must be 0 (off) or more, got {sampling.top_k}"
        return ""
