"""From records to histories. Pure: who reads the topics feeds them in the order that `RequestLog` names."""

from collections.abc import Container, Iterator

from infra.audit.history import History
from schemas.priority import PriorityClass
from schemas.records import (
    Cancellation,
    Claim,
    Completion,
    Dispatched,
    Duplicate,
    InferenceRequest,
    Tokens,
    Usage,
)
from schemas.stream_state import Effect, ReplyRecord, Run, StreamState
from schemas.token_records import TokenChunk
from schemas.topics import priority_of
from streams.ledger.batch_outcome import reopen
from streams.ledger.billing import BillingError, row_of

REPLY_RECORDS = ReplyRecord.__args__


class TooManyError(ValueError):
    """More requests than one pass may hold."""


class RequestLog:
    """Takes all of inference.requests first, then inference.cancellations, then inference.tokens, each
    partition in order, then inference.usage. Requests that were accepted before `since_ms` (ms of the epoch)
    are passed over, and those that are not of this pass: pass `number` of `passes` takes the request_ids
    whose first two bytes leave that rest. At most `most` requests. Measured with 128 tokens each (AMD EPYC):
    1.4 ms and, with its billed row, 2.8 KB a request.

    `in_flight_ms`: tokens so long before a cancel have reached the client. `keep_tokens`: requests whose
    token ids are needed after their end.
    """

    def __init__(
        self,
        since_ms: int,
        *,
        in_flight_ms: int,
        keep_tokens: Container[bytes] = (),
        number: int = 0,
        passes: int = 1,
        most: int = 1_000_000,
    ) -> None:
        self._since_ms = since_ms
        self._in_flight_ms = in_flight_ms
        self._keep_tokens = keep_tokens
        self._number = number
        self._passes = passes
        self._most = most
        self._histories: dict[bytes, History] = {}
        self._by_partition: dict[int, dict[bytes, History]] = {}
        self.unreadable_rows = 0

    def __iter__(self) -> Iterator[History]:
        return iter(self._histories.values())

    def __len__(self) -> int:
        return len(self._histories)

    def get(self, request_id: bytes) -> History | None:
        return self._histories.get(request_id)

    def has(self, request_id: bytes) -> bool:
        """Whether a request of this id would be looked at in this pass."""
        return int.from_bytes(request_id[:2], "big") % self._passes == self._number

    def on_request(self, record: InferenceRequest) -> None:
        """Raises TooManyError."""
        known = self._histories.get(record.request_id)
        if known is not None:
            known.attempts_sent = max(known.attempts_sent, record.attempt)
            return
        if record.accepted_at < self._since_ms or not self.has(record.request_id):
            return
        if len(self._histories) >= self._most:
            raise TooManyError(f"more than {self._most:,} requests: name a shorter time, or more passes")
        history = History(
            record.request_id,
            record.tenant,
            record.accepted_at,
            record.end_ms,
            len(record.prompt_token_ids),
            priority_of(record.reply_partition) is PriorityClass.BATCH,
            StreamState(record.request_id),
            attempts_sent=record.attempt,
        )
        self._histories[record.request_id] = history
        self._by_partition.setdefault(record.reply_partition, {})[record.request_id] = history

    def on_cancellation(self, record: Cancellation, timestamp_ms: int) -> None:
        """From inference.cancellations, inference.requests or a reply partition."""
        history = self._histories.get(record.request_id)
        if history is None or record.tenant != history.tenant:
            return
        history.waived = history.waived or record.waived
        if record.slot is None:
            history.cancels.append((record.attempt, timestamp_ms))

    def on_reply(self, partition: int, record: object, timestamp_ms: int) -> None:
        """A record of inference.tokens."""
        here = self._by_partition.get(partition)
        if here is None:
            return
        if isinstance(record, Tokens):
            run = Run(record.slot, record.epoch)
            for chunk in record.chunks:
                if (history := here.get(chunk.request_id)) is not None:
                    self._on_chunk(history, run, chunk, timestamp_ms)
        elif isinstance(record, Cancellation):
            self.on_cancellation(record, timestamp_ms)
        elif isinstance(record, Claim) and record.request_id is None:
            for history in here.values():
                history.state.apply(record, timestamp_ms)
        elif isinstance(record, Duplicate):
            if (history := here.get(record.request_id)) is not None:
                history.joined = True
        elif isinstance(record, REPLY_RECORDS):
            request_id = record.request_id
            if request_id is not None and (history := here.get(request_id)) is not None:
                self._on_record(history, record, timestamp_ms)

    def on_usage(self, usage: Usage) -> None:
        history = self._histories.get(usage.request_id)
        if history is None:
            return
        try:
            row = row_of(usage)
        except BillingError:
            self.unreadable_rows += 1
            return
        known = history.row
        if known is None or row.version > known.version:
            if known is not None and row.attempt > known.attempt:
                history.rows_of.clear()
            history.row = row
        elif row.attempt < known.attempt:
            return
        if not usage.sealed and usage.slot is not None and usage.epoch is not None:
            history.rows_of.add(Run(usage.slot, usage.epoch))

    def _on_chunk(self, history: History, run: Run, chunk: TokenChunk, timestamp_ms: int) -> None:
        state = history.state
        history.attempts_told = max(history.attempts_told, chunk.attempt)
        before = len(state.token_ids)
        effect = state.apply_chunk(run, chunk, timestamp_ms)
        if state.run is not None:
            history.ran = True
        if effect is not Effect.TOKENS:
            return
        history.num_tokens = len(state.token_ids)
        history.last_token_at = timestamp_ms
        cancelled_at = history.cancelled_at(chunk.attempt)
        if cancelled_at is None or timestamp_ms <= cancelled_at - self._in_flight_ms:
            history.early_tokens = history.num_tokens
        elif timestamp_ms > cancelled_at and history.num_tokens > before:
            history.late_steps += 1

    def _on_record(self, history: History, record: ReplyRecord, timestamp_ms: int) -> None:
        state = history.state
        if isinstance(record, Dispatched):
            history.attempts_told = max(history.attempts_told, record.attempt)
        end = state.end
        if (
            isinstance(record, Completion)
            and isinstance(end, Completion)
            and (record.attempt, record.slot, record.epoch) == (end.attempt, end.slot, end.epoch)
        ):
            history.ended_twice = True
        effect = state.apply(record, timestamp_ms)
        history.ran = history.ran or state.run is not None
        if effect is not Effect.ENDED:
            return
        if history.is_item and reopen(state):
            return  # its coordinator sends it again
        history.ended_at = timestamp_ms
        if not state.may_retry and history.request_id not in self._keep_tokens:
            state.token_ids = []  # counted, and nothing comes behind them
