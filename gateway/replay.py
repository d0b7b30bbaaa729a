"""One client that reads a stream from the log: its own fold of the request, and what it lacks of it."""

from collections.abc import Sequence

from gateway.config import GatewayConfig
from gateway.ends import error_of
from gateway.metrics import Timing
from gateway.reader import StreamReader
from schemas.api.errors import ApiError
from schemas.models import LoadedModel
from schemas.records import Cancellation, Completion, Failed, Rejected, TokenChunk
from schemas.stream_state import RETRYABLE_FINISHES, Effect, ReplyRecord, Run, StreamState

# An owner says Retry or Failed within milliseconds, one that was stopped for a while when it wakes.
RETRY_WAIT_MS = 10_000
_MOST_CHARS = 4 << 20  # beyond any model's context: what is held for a reader is at most one output


class ReplayReader(StreamReader):
    """Shows what lies behind output position `after` (-1: all) and drops the text up to it.

    The text up to a position is a function of the tokens up to it: a character whose bytes are not whole
    at `after` was not shown with it, and comes behind it.
    """

    __slots__ = ("_known_chars", "_known_push", "_num_known")

    def __init__(
        self, config: GatewayConfig, model: LoadedModel, may_be_cut: bool, after: int, now: float
    ) -> None:
        super().__init__(
            model.spec.id,
            Timing(),  # how fast a log is read says nothing about the fleet
            now,
            model.tokenizer.detokenizer(),
            may_be_cut=may_be_cut,
            limit_chars=_MOST_CHARS,
            start_wait_s=config.start_wait_s,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
        )
        self._num_known = after + 1
        self._known_chars = 0
        self._known_push = model.tokenizer.detokenizer().push

    def on_tokens(self, token_ids: Sequence[int], count: int, finish_reason: str | None, now: float) -> bool:
        lacking = self._num_known - (count - len(token_ids))
        if lacking > 0:
            self._known_chars += len(self._known_push(token_ids[:lacking]))
        return super().on_tokens(token_ids, count, finish_reason, now)

    def _add(self, text: str) -> None:
        known = max(0, self._known_chars - self._shown_chars)
        self._shown_chars += min(known, len(text))
        if known < len(text):
            super()._add(text[known:])


class Replay:
    """Feeds `reader` from the records of one reply partition. Pure but for the reader's waking.

    Give it all records of the partition from the request's first one on, in order.
    """

    __slots__ = ("_ended_at", "_ended_clock", "_stopped", "reader", "request_id", "state", "tenant")

    def __init__(self, request_id: bytes, tenant: str, reader: StreamReader) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.reader = reader
        self.state = StreamState(request_id)
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
            count = len(state.token_ids)
            if not reader.on_tokens(state.token_ids[before:], count, chunk.finish_reason, now):
                reader.on_end(ApiError(408, "slow_reader", "the client reads too slowly; come back"))

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
        """A client asked for the end: a Completion `cancelled` will be it, and no retry comes."""
        self._stopped = self._stopped or record.tenant == self.tenant

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
            # Only the attempt is over, unless its owner wanted that; it does not say so in the log.
            self._ended_at = timestamp_ms
            return
        self._tell_end()

    def _tell_end(self) -> None:
        match self.state.end:
            case Completion() as end:
                self.reader.on_end(end)
            case Rejected() | Failed() as end:
                self.reader.on_end(error_of(end))
