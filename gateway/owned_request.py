"""One request that this gateway owns, and the records that only its owner writes about it."""

from dataclasses import dataclass, field, replace

from gateway.actions import Bill, Cancel
from gateway.idempotency import Joined
from gateway.reader import Reader
from schemas.headers import ReplyTo, reply_headers
from schemas.records import Cancellation, Completion, Failed, InferenceRequest, RateLimit, Rejected, Usage
from schemas.stream_state import ENGINE_FAULT, Run, StreamState


def sealed_by_owner(state: StreamState) -> bool:
    """Whether the usage row of the worker that ended it is not the truth, or there is none."""
    match state.end:
        case Completion():
            return bool(state.strays)
        case Rejected() as end:
            return end.status == 499 or bool(state.strays) or state.attempt > 1
        case Failed():
            return True
    return False


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """`partition` is that of the tenant's hashed topics.

    `offset` is where the newest record of the request lies, None while that is not acked. `*_clock` are
    milliseconds of the log's clock: `read_clock` when admission's read offset was first seen above
    `offset`, `sign_clock` when the last sign of the run (of broker time `sign_at`) was seen, `stalled_clock`
    when it first said that its engine stands still. `reader` is the client, None when nobody waits any more;
    `cancelled` says why the work was stopped. `detach_ms`: how long it goes on when nobody reads,
    `unread_clock`: since when nobody does. `retrying` is why a Retry, `failing` whether a Failed is on its
    way to the log. `over`: the log says the end. `first_offset`: nothing about it lies before. Of a request
    that was another owner's: until `kept_until` its clients may come back. Of one that is another's now:
    `claimed_from` is the owner that it is being claimed from, `ended_clock` when an attempt ended early.
    `told_why`: the log says why it was cancelled, or need not.
    `oversized`: no record of the log holds it with the output that it has.
    `waived`: what it did costs nothing. `described`: it is stored, to be asked for again; `description` is
    what was stored. `stream_id` is where its answer is read, "" of one that was not accepted here. `joined`:
    another request with its Idempotency-Key was first, and it is that one's answer that is shown.
    `rate_limits`: what its tenant has left, as admission last said. `ended_at`: broker time (ms) of its end.
    `sealed`: its owner has written its row. `counted`: prompt and output tokens, once their ids are dropped.
    """

    request: InferenceRequest
    partition: int
    reader: Reader | None
    state: StreamState
    traceparent: str | None = None
    offset: int | None = None
    resends: int = 0
    read_clock: int | None = None
    sign_at: int = 0
    sign_clock: int | None = None
    stalled_clock: int | None = None
    cancelled: str | None = None
    cancelled_clock: int = 0
    unread_clock: int | None = None
    retrying: str | None = None
    failing: bool = False
    over: bool = False
    first_offset: int = 0
    kept_until: int = 0
    claimed_from: int | None = None
    ended_clock: int | None = None
    ended_at: int = 0
    sealed: bool = False
    counted: tuple[int, int] | None = None
    oversized: bool = False
    waived: bool = False
    described: bool = False
    told_why: bool = False
    stream_id: str = ""
    description: str | None = None
    joined: Joined | None = None
    rate_limits: list[RateLimit] = field(default_factory=list)
    stray_cancels: dict[Run, int] = field(default_factory=dict)

    @property
    def answer_id(self) -> bytes:
        """The request_id that the answer's ids are made of."""
        return self.request.request_id if self.joined is None else self.joined.request_id

    @property
    def answer_at_s(self) -> int:
        """When the answer says it was created (s of the epoch)."""
        return (self.request.accepted_at if self.joined is None else self.joined.accepted_at) // 1000

    @property
    def detach_ms(self) -> int:
        return self.request.detach_ms

    @detach_ms.setter
    def detach_ms(self, duration: int) -> None:
        # In the request itself, so that who takes it over knows; set it before it is sent.
        self.request.detach_ms = duration

    @property
    def is_told_elsewhere(self) -> bool:
        """Others read it, or may ask for it again: what its owner decides is of interest to them."""
        asked_again = self.detach_ms > 0 or self.described or self.request.idempotency is not None
        return asked_again or bool(self.state.readers)

    def begin_attempt(self) -> None:
        """The next attempt goes on behind the output tokens that count."""
        state = self.state
        self.request = replace(
            self.request,
            attempt=state.attempt,
            # What a fallback model began, it goes on with.
            model=state.model or self.request.model,
            output_token_ids=list(state.token_ids),
        )
        self.offset = self.read_clock = self.sign_clock = self.stalled_clock = None
        self.resends = 0

    def cap(self) -> None:
        """Lets it have no more output tokens than admission does, now and in attempts to come."""
        granted = self.state.max_tokens
        if granted is not None and granted < self.request.sampling.max_tokens:
            sampling = replace(self.request.sampling, max_tokens=granted)
            self.request = replace(self.request, sampling=sampling)

    def cancellation(self, reason: str) -> Cancel:
        """Stops all attempts so far; while no run is bound, admission has to hear of it too."""
        cancel = self._cancel(reason, self.state.attempt, None, may_wait=self.state.run is None)
        asked = self.request.idempotency
        if not self.waived:
            return cancel
        record = replace(cancel.record, waived=True, key=None if asked is None else asked.key)
        return replace(cancel, record=record, behind_request=cancel.behind_request or asked is not None)

    def earlier_cancellation(self, reason: str) -> Cancel:
        """Stops the attempts before this one."""
        return self._cancel(reason, self.state.attempt - 1, None, may_wait=False)

    def stray_cancellation(self, run: Run, attempt: int) -> Cancel:
        """Stops one run that is not, or no longer, the bound one."""
        return self._cancel("stray", attempt, run, may_wait=False)

    def sealed_usage(
        self, finish_reason: str, ended_at: int, cached_tokens: int = 0, *, billed: bool = True
    ) -> Bill:
        """What is true by the fold. A request that never had a run costs nothing, its prompt neither."""
        request, run = self.request, self.state.run
        billed = billed and not self.waived
        has_run = billed and (run is not None or self.state.attempt > 1)
        prompt, output = self.counted or (len(request.prompt_token_ids), len(self.state.token_ids))
        usage = Usage(
            request_id=request.request_id,
            attempt=self.state.attempt,
            sealed=True,
            tenant=request.tenant,
            priority=request.priority,
            model=self.state.model or request.model,
            input_tokens=prompt if has_run else 0,
            cached_tokens=cached_tokens if billed else 0,
            output_tokens=output if billed else 0,
            finish_reason=finish_reason,
            accepted_at=request.accepted_at,
            ended_at=ended_at,
            slot=None if run is None else run.slot,
            epoch=None if run is None else run.epoch,
        )
        to = ReplyTo(request.request_id, self.state.attempt, request.reply_partition)
        return Bill(usage, self.partition, reply_headers(to, self.traceparent))

    def final_bill(self, ended_at: int) -> Bill | None:
        """The sealed row that its owner writes at the end, None where the worker's row is the truth."""
        end = self.state.end
        if not (sealed_by_owner(self.state) or self.waived):
            return None
        match end:
            case Completion():
                return self.sealed_usage(end.finish_reason, ended_at, end.cached_tokens)
            case Rejected():
                return self.sealed_usage("cancelled" if end.code == "cancelled" else "error", ended_at)
            case Failed():
                reason = "cancelled" if end.code == "cancelled" else "error"
                return self.sealed_usage(reason, ended_at, billed=end.code != ENGINE_FAULT)
        return None

    def drop_tokens(self) -> None:
        """It is over: their number is enough. Its reader may still need the list."""
        prompt = self.request.prompt_token_ids
        self.counted = len(prompt), len(self.state.token_ids)
        self.state.token_ids = []
        prompt.clear()

    def _cancel(self, reason: str, attempt: int, run: Run | None, *, may_wait: bool) -> Cancel:
        record = Cancellation(
            request_id=self.request.request_id,
            attempt=attempt,
            tenant=self.request.tenant,
            reason=reason,
            slot=None if run is None else run.slot,
            epoch=None if run is None else run.epoch,
        )
        return Cancel(record, self.partition, behind_request=may_wait)
