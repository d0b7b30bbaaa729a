"""A stream that is read from the log: one fold for all clients that read it here, and what each lacks."""

import json
from typing import Any

from gateway.config import GatewayConfig
from gateway.ends import error_of
from gateway.metrics import Timing
from gateway.reader import Reader, StreamReader
from schemas.api.errors import ApiError
from schemas.models import LoadedModel
from schemas.records import Cancellation, Completion, Described, Failed, Rejected
from schemas.sampling import TokenLogprobs
from schemas.stream_state import RETRYABLE_FINISHES, Effect, ReplyRecord, Run, StreamState
from schemas.token_records import TokenChunk

# An owner says Retry or Failed within milliseconds, one that was stopped for a while when it wakes.
RETRY_WAIT_MS = 10_000
# What a fold costs beside its tokens; a token: its place in the list and an int.
_FOLD_BYTES = 2_000
_TOKEN_BYTES = 40
_LOGPROBS_BYTES = 200


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


class StreamFold:
    """What the records of one reply partition say about a request. Pure but for its readers' waking.

    Give it all records of the partition from the request's first one on, in order; some may come again.
    `position`: while nobody gives it records, those before were given. `views` are the clients; `used_at` is
    when the last one came or left (monotonic s). `created` is the response as it was created, once that was
    read. `caught_up`: all that the log held about the request was read. `over`: its end was told, nothing
    more will come; `lost`: nothing more will, and what came before it may lack. `waived`: its client was
    refused.
    """

    __slots__ = (
        "_ended_clock",
        "_logprobs",
        "_stopped",
        "caught_up",
        "created",
        "ended_at",
        "fed",
        "first_offset",
        "kept",
        "lost",
        "over",
        "partition",
        "position",
        "request_id",
        "state",
        "tenant",
        "used_at",
        "views",
        "waived",
    )

    def __init__(self, request_id: bytes, tenant: str, state: StreamState | None = None) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.state = StreamState(request_id) if state is None else state
        self.partition = self.first_offset = self.position = 0
        self.views: list[Replay] = []
        self.used_at = 0.0
        self.fed = False
        self.kept = False
        self.created: dict[str, Any] | None = None
        self.caught_up = False
        self.over = False
        self.lost = False
        self.waived = False
        self.ended_at: int | None = None
        self._ended_clock: int | None = None
        self._stopped = False
        self._logprobs: list[TokenLogprobs | None] = []  # shorter than the tokens where none were told

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.over or self.lost

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        return self._logprobs

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        tokens = len(self.state.token_ids)
        alternatives = sum(len(told.top_token_ids) for told in self._logprobs if told is not None)
        described = 0 if self.created is None else len(json.dumps(self.created))
        told = _LOGPROBS_BYTES * len(self._logprobs) + 2 * _TOKEN_BYTES * alternatives
        return _FOLD_BYTES + described + _TOKEN_BYTES * tokens + told

    def on_chunk(self, run: Run, chunk: TokenChunk, timestamp_ms: int, now: float) -> None:
        """`timestamp_ms` is broker time, `now` monotonic seconds."""
        if self.done:
            return
        state = self.state
        before = len(state.token_ids)
        effect = state.apply_chunk(run, chunk, timestamp_ms)
        if effect is Effect.BOUND:
            for view in self.views:
                view.bind()
        elif effect is Effect.TOKENS:
            logprobs = chunk.logprobs[before - chunk.position :] if chunk.logprobs else []
            if logprobs:
                self._logprobs += [None] * (before - len(self._logprobs))
                self._logprobs += logprobs[: len(state.token_ids) - before]
            for view in self.views:
                view.show(before, logprobs, chunk.finish_reason, now)

    def on_record(self, record: ReplyRecord, timestamp_ms: int) -> None:
        if self.done:
            return
        effect = self.state.apply(record, timestamp_ms)
        if effect is Effect.BOUND:
            for view in self.views:
                view.bind()
        elif effect is Effect.RETRIED:
            self.ended_at = self._ended_clock = None
        elif effect is Effect.ENDED:
            end = self.state.end
            if isinstance(end, Completion) and end.finish_reason in RETRYABLE_FINISHES and not self._stopped:
                # Only the attempt is over, unless its owner wanted that: it says so where others may care.
                self.ended_at = timestamp_ms
            else:
                self.settle()

    def on_cancellation(self, record: Cancellation) -> None:
        """The end was asked for."""
        if record.tenant != self.tenant or self.done:
            return
        if record.waived:
            self.waived = True
            for view in self.views:
                view.on_waived()
        self.stop()

    def stop(self) -> None:
        """A Completion `cancelled` is the end, and no retry comes."""
        self._stopped = True
        if self.ended_at is not None and not self.done:
            self.settle()

    def on_description(self, record: Described) -> None:
        self.created = json.loads(record.body)
        for view in self.views:
            view.on_news()

    def on_time(self, given_ms: int, clock_ms: int | None) -> None:
        """`given_ms`: broker time of the last record that was given. `clock_ms`: the log's clock, when all
        records there are were given."""
        if clock_ms is not None and not self.caught_up:
            self.caught_up = True
            for view in self.views:
                view.on_news()
        if self.ended_at is None or self.done:
            return
        waited = given_ms - self.ended_at
        if clock_ms is not None:
            self._ended_clock = clock_ms if self._ended_clock is None else self._ended_clock
            waited = max(waited, clock_ms - self._ended_clock)
        if waited >= RETRY_WAIT_MS:
            self.settle()

    def settle(self) -> None:
        """The end that it has is the last word."""
        self.over = True
        for view in self.views:
            view.tell_end()

    def lose(self, error: ApiError) -> None:
        """It cannot be read on."""
        self.lost = not self.over
        for view in self.views:
            view.reader.on_end(error)


class Replay:
    """One client of a fold: it is shown by `reader` what the fold holds when it comes, and what comes then.

    `fold` is its own until it is shown another.
    """

    __slots__ = ("fold", "reader")

    def __init__(self, request_id: bytes, tenant: str, reader: Reader) -> None:
        self.reader = reader
        self.fold = StreamFold(request_id, tenant)
        self.fold.views.append(self)
        reader.token_ids = self.fold.state.token_ids

    @property
    def request_id(self) -> bytes:
        return self.fold.request_id

    @property
    def state(self) -> StreamState:
        return self.fold.state

    @property
    def done(self) -> bool:
        """There is nothing more to show, or no one."""
        return self.reader.end is not None or self.reader.disconnected

    def attach(self, fold: StreamFold, now: float) -> None:
        """Shows what `fold` holds, as if each record came now (monotonic s), and what comes."""
        self.fold.views.remove(self)
        self.fold = fold
        fold.views.append(self)
        state = fold.state
        count, unstopped = len(state.token_ids), state.num_unstopped
        self.reader.token_ids = state.token_ids
        if state.run is not None or state.lost or count:
            self.bind()
        if unstopped is None and (count or state.finish_reason is not None):
            self.show(0, fold.logprobs, state.finish_reason, now)
        elif unstopped is not None:
            if unstopped:
                self.reader.on_tokens(unstopped, None, now)
            self.show(0, fold.logprobs, "stop", now)
        if fold.waived:
            self.on_waived()
        if fold.over:
            self.tell_end()

    def bind(self) -> None:
        if not ((self.reader.bound and self.reader.heard) or self.done):
            self.reader.on_bound(self.state.model)

    def show(
        self,
        begin: int,
        logprobs: list[TokenLogprobs] | list[TokenLogprobs | None],
        finish_reason: str | None,
        now: float,
    ) -> None:
        """The output tokens from position `begin` on are new."""
        reader = self.reader
        if self.done:
            return
        self.bind()
        if reader.told is not None:
            reader.told.add(reader.token_ids[begin:], logprobs, finish_reason)
        reader.on_tokens(len(reader.token_ids), finish_reason, now)

    def on_news(self) -> None:
        """The fold knows something more beside the output."""

    def on_waived(self) -> None:
        """The client of the request was refused."""

    def tell_end(self) -> None:
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

    def on_waived(self) -> None:
        if not self.done:
            # Admission has not heard yet that the key is free.
            self.waived = True
            message = "the request that was first with this Idempotency-Key was refused; try again"
            self.reader.on_end(ApiError(409, "idempotency_key_in_use", message, None, 1_000))

    def tell_end(self) -> None:
        end = self.state.end
        if isinstance(end, Completion) and end.finish_reason in RETRYABLE_FINISHES:
            message = "the request that was first with this Idempotency-Key was stopped; ask with another key"
            self.reader.on_end(ApiError(410, "cancelled", message))
        else:
            super().tell_end()
