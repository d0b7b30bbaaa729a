"""One client that reads a stream from the log: its own fold of the request, and what it lacks of it."""

from gateway.config import GatewayConfig
from gateway.ends import error_of
from gateway.metrics import Timing
from gateway.reader import Reader, StreamReader
from schemas.api.errors import ApiError
from schemas.models import LoadedModel
from schemas.records import Cancellation, Completion, Described, Failed, Rejected, TokenChunk
from schemas.stream_state import RETRYABLE_FINISHES, Effect, ReplyRecord, Run, StreamState

# An owner says Retry or Failed within milliseconds, one that was stopped for a while when it wakes.
RETRY_WAIT_MS = 10_000


class ReplayReader(StreamReader):
    """Shows what lies behind output position `after` (-1: all)."""

    __slots__ = ()

    def __init__(
        self, config: GatewayConfig, model: LoadedModel, may_be_cut: bool, after: int, now: float
    ) -> None:
        super().__init__(
            model.spec.id,
            Timing(),  # how fast a log is read says nothing about the fleet
            now,
            model.tokenizer.detokenizer(),
            may_be_cut=may_be_cut,
            start_wait_s=config.start_wait_s,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
            after=after,
        )


class Replay:
    """Feeds `reader` from the records of one reply partition. Pure but for the reader's waking.

    Give it all records of the partition from the request's first one on, in order.
    """

    __slots__ = ("_ended_at", "_ended_clock", "_stopped", "reader", "request_id", "state", "tenant")

    def __init__(self, request_id: bytes, tenant: str, reader: Reader) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.reader = reader
        self.state = StreamState(request_id)
        reader.token_ids = self.state.token_ids
        self._ended_at: int | None = None
        self._ended_clock: int | None = None
        self._stopped = False

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.reader.end is not None or self.reader.disconnected

    def on_chunk(self, run: Run, chunk: TokenChunk, timestamp_ms: int, now: float) -> None:
        """`timestamp_ms` is broker time, `now` monotonic seconds."""
        if self.done:
            return
        state, reader = self.state, self.reader
        before = len(state.token_ids)
        effect = state.apply_chunk(run, chunk, timestamp_ms)
        if effect not in (Effect.TOKENS, Effect.BOUND):
            return
        if not reader.bound:
            reader.on_bound(state.model)
        if effect is Effect.TOKENS:
            if reader.told is not None:
                told = chunk.logprobs[before - chunk.position :]
                reader.told.add(state.token_ids[before:], told, chunk.finish_reason)
            reader.on_tokens(len(state.token_ids), chunk.finish_reason, now)

    def on_record(self, record: ReplyRecord, timestamp_ms: int) -> None:
        if self.done:
            return
        effect = self.state.apply(record, timestamp_ms)
        if effect is Effect.BOUND and not self.reader.bound:
            self.reader.on_bound(self.state.model)
        elif effect is Effect.RETRIED:
            self._ended_at = self._ended_clock = None
        elif effect is Effect.ENDED:
            self._on_end(timestamp_ms)

    def on_cancellation(self, record: Cancellation) -> None:
        """The end was asked for: a Completion `cancelled` is it, and no retry comes."""
        if record.tenant != self.tenant or self.done:
            return
        self._stopped = True
        if self._ended_at is not None:
            self._tell_end()

    def on_description(self, record: Described) -> None:
        """For those who answer in the form of the API that took the request."""

    def on_time(self, given_ms: int, clock_ms: int | None) -> None:
        """`given_ms`: broker time of the last record that was given. `clock_ms`: the log's clock, when all
        records there are were given."""
        if self._ended_at is None or self.done:
            return
        waited = given_ms - self._ended_at
        if clock_ms is not None:
            self._ended_clock = clock_ms if self._ended_clock is None else self._ended_clock
            waited = max(waited, clock_ms - self._ended_clock)
        if waited >= RETRY_WAIT_MS:
            self._tell_end()

    def _on_end(self, timestamp_ms: int) -> None:
        end = self.state.end
        if isinstance(end, Completion) and end.finish_reason in RETRYABLE_FINISHES and not self._stopped:
            # Only the attempt is over, unless its owner wanted that: it says so where others may care.
            self._ended_at = timestamp_ms
            return
        self._tell_end()

    def _tell_end(self) -> None:
        match self.state.end:
            case Completion() as end:
                self.reader.on_end(end)
            case Rejected() | Failed() as end:
                self.reader.on_end(error_of(end))


class JoinedReplay(Replay):
    """For a client that has asked for the whole request again: one that was stopped is no answer to it.

    `waived`: neither is one whose client was refused, and its key should have been free.
    """

    __slots__ = ("waived",)

    def __init__(self, request_id: bytes, tenant: str, reader: Reader) -> None:
        super().__init__(request_id, tenant, reader)
        self.waived = False

    def on_cancellation(self, record: Cancellation) -> None:
        if record.waived and record.tenant == self.tenant and not self.done:
            # Admission has not heard yet that the key is free.
            self.waived = True
            message = "the request that was first with this Idempotency-Key was refused; try again"
            self.reader.on_end(ApiError(409, "idempotency_key_in_use", message, None, 1_000))
            return
        super().on_cancellation(record)

    def _tell_end(self) -> None:
        end = self.state.end
        if isinstance(end, Completion) and end.finish_reason in RETRYABLE_FINISHES:
            message = "the request that was first with this Idempotency-Key was stopped; ask with another key"
            self.reader.on_end(ApiError(410, "cancelled", message))
        else:
            super()._tell_end()
