"""The state of a request: a fold over its reply partition (architecture §4).

Owner, readers and successors feed the records of the partition, in offset order, through `apply` and
arrive at the same state. Records of one producer keep their order, those of different producers do not:
`Tokens` may lie before the `Dispatched` that caused them, an old owner's `Retry` behind the new owner's.
The fold is pure: it sends nothing and knows no time but the broker's timestamps in the log.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from schemas.records import (
    Admitted,
    Attach,
    Claim,
    Completion,
    Detach,
    Dispatched,
    Failed,
    Rejected,
    Retry,
)
from schemas.token_records import TokenChunk

# What a run says of output that it takes for wrong by now, and an owner of what it cannot build on.
ENGINE_FAULT = "engine_fault"
# After these the attempt is over but the request need not be: its owner may still send a Retry.
RETRYABLE_FINISHES = frozenset({"cancelled", "error", ENGINE_FAULT})
# The reason of a Cancellation, and the code of the end that comes of it.
DEADLINE_EXCEEDED = "deadline_exceeded"
# The reason of a Retry because the run is gone that was to compute the prompt. It counts only while the bound
# run has given no sign: from then on the request is in that one's hands.
PREFILL_LOST = "prefill_lost"
# Of a request that was accepted less than this ago admission may say Admitted though it was answered, for a
# new holder of a partition does not know that. Owners keep what has ended within reach for longer, so that
# who comes after them does not take it for a request without an end.
LATE_ADMITTED_MS = 15_000


class Run(NamedTuple):
    """One life of one worker."""

    slot: int
    epoch: int


class Gap(NamedTuple):
    """The bound run went on at output position `found`, but only `expected` tokens were counted."""

    expected: int
    found: int


class Effect(Enum):
    """What a record did to the state."""

    IGNORED = auto()
    ADMITTED = auto()
    BOUND = auto()  # a run is bound, or what serves is known of it now; with Tokens only if they were empty
    TOKENS = auto()  # token_ids grew
    ALIVE = auto()  # a sign of life of the bound run
    GAP = auto()  # a gap was found now; the attempt counts nothing more
    STRAY = auto()  # a run that is not, or no longer, the bound one: cancel it
    ENDED = auto()
    RETRIED = auto()
    KEPT = auto()  # a Retry that came too late: the bound run has the request, and goes on
    CLAIMED = auto()
    READERS = auto()


ReplyRecord = Admitted | Dispatched | Completion | Rejected | Retry | Failed | Claim | Attach | Detach


@dataclass(slots=True)
class StreamState:
    """State of one request. `token_ids` are the output tokens that count: what is delivered and billed.

    `owner_epoch` is None until a record names the owner. `last_sign_at` is the broker time (ms) of the
    last record from the bound run. `owner_slot` is the gateway slot that claimed it, None while it belongs to
    who accepted it. `request_at` is where a record of it, of whatever attempt, lies in inference.requests:
    (partition, offset). `max_tokens`: it may have so many output tokens, where admission allows fewer than it
    asks for. `prefill` is the run that was given the prompt, until the bound one gives a sign. Of earlier
    attempts: `num_carried` output tokens count, and `lost` are the runs that were lost. `num_unstopped` is
    how many tokens counted before the chunk that said "stop", None while none did or tokens came behind it:
    what of that chunk is shown, its Completion says.
    """

    request_id: bytes
    owner_epoch: int | None = None
    owner_slot: int | None = None
    request_at: tuple[int, int] | None = None
    attempt: int = 1
    run: Run | None = None
    prefill: Run | None = None
    model: str | None = None
    max_tokens: int | None = None
    requests_offset: int | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_unstopped: int | None = None
    gap: Gap | None = None
    end: Completion | Rejected | Failed | None = None
    strays: set[Run] = field(default_factory=set)
    lost: list[Run] = field(default_factory=list)
    num_carried: int = 0
    readers: dict[tuple[int, int], int] = field(default_factory=dict)
    detach_ms: int = 0
    last_sign_at: int = 0

    @property
    def ended(self) -> bool:
        """No run will add tokens, unless the owner retries (see `may_retry`)."""
        return self.end is not None

    @property
    def may_retry(self) -> bool:
        """A Retry from the owner would count: the request is open, or only its attempt failed."""
        return self.end is None or (
            isinstance(self.end, Completion) and self.end.finish_reason in RETRYABLE_FINISHES
        )

    def copy(self, token_ids: list[int]) -> "StreamState":
        """One that goes its own way, with these output tokens."""
        return replace(
            self,
            token_ids=token_ids,
            strays=self.strays.copy(),
            lost=self.lost.copy(),
            readers=self.readers.copy(),
        )

    def apply(self, record: ReplyRecord, timestamp_ms: int = 0) -> Effect:
        """Folds one record about this request (for `Tokens`: `apply_chunk`)."""
        match record:
            case Dispatched():
                return self._dispatched(record, timestamp_ms)
            case Completion():
                return self._completion(record, timestamp_ms)
            case Admitted():
                if record.attempt != self.attempt or self.run is not None or self.ended:
                    return Effect.IGNORED
                self._learn_owner(record.owner_epoch)
                self.requests_offset = record.requests_offset
                self.request_at = record.requests_partition, record.requests_offset
                return Effect.ADMITTED
            case Rejected():
                if record.attempt != self.attempt or self.run is not None or self.ended:
                    return Effect.IGNORED
                self.end = record
                return Effect.ENDED
            case Retry():
                return self._retry(record)
            case Failed():
                if (
                    record.attempt != self.attempt
                    or not self.may_retry
                    or not self._is_owner(record.owner_epoch)
                ):
                    return Effect.IGNORED
                self.end = record
                return Effect.ENDED
            case Claim():
                if record.request_id not in (None, self.request_id) or not self._is_owner(record.from_epoch):
                    return Effect.IGNORED
                self.owner_epoch, self.owner_slot = record.by_epoch, record.by_slot
                return Effect.CLAIMED
            case Attach():
                reader = (record.slot, record.epoch)
                self.readers[reader] = self.readers.get(reader, 0) + 1
                return Effect.READERS
            case Detach():
                return self._detach(record)

    def apply_chunk(self, run: Run, chunk: TokenChunk, timestamp_ms: int = 0) -> Effect:
        """Folds one chunk of a `Tokens` record. After TOKENS, what is new is the tail of `token_ids`."""
        if chunk.attempt != self.attempt or self.end is not None:
            return self._stray(run, chunk.attempt)
        bound_now = self.run is None
        if bound_now:
            self.run = run
        elif run != self.run:
            self.strays.add(run)
            return Effect.STRAY
        self.last_sign_at, self.prefill = timestamp_ms, None
        if not chunk.token_ids and chunk.finish_reason is None:
            return Effect.BOUND if bound_now else Effect.ALIVE
        if self.gap is not None:
            return Effect.IGNORED
        counted = len(self.token_ids)
        if chunk.position > counted:
            self.gap = Gap(counted, chunk.position)
            return Effect.GAP
        known = counted - chunk.position
        if known >= len(chunk.token_ids) and (chunk.token_ids or chunk.finish_reason is None):
            return Effect.IGNORED
        self.token_ids += chunk.token_ids[known:]
        self.finish_reason = chunk.finish_reason
        if chunk.finish_reason == "stop":
            self.num_unstopped = counted if self.num_unstopped is None else self.num_unstopped
        elif self.num_unstopped is not None:
            self.num_unstopped = None
        return Effect.TOKENS

    def _dispatched(self, record: Dispatched, timestamp_ms: int) -> Effect:
        run = Run(record.slot, record.epoch)
        # Its tokens, or even their end, may have come first.
        overtaken = record.attempt == self.attempt and run == self.run and self.model is None
        if record.attempt != self.attempt or (self.end is not None and not overtaken):
            return self._stray(run, record.attempt)
        self._learn_owner(record.owner_epoch)
        if record.requests_partition is not None and record.requests_offset is not None:
            self.request_at = record.requests_partition, record.requests_offset
        bound_now = self.run is None
        if bound_now:
            self.run, self.last_sign_at = run, timestamp_ms
            if record.prefill_slot is not None and record.prefill_epoch is not None:
                self.prefill = Run(record.prefill_slot, record.prefill_epoch)
        elif run != self.run:
            self.strays.add(run)
            return Effect.STRAY
        if record.max_tokens is not None:
            self.max_tokens = record.max_tokens
        self.model = record.model
        return Effect.BOUND if bound_now or overtaken else Effect.IGNORED

    def _completion(self, record: Completion, timestamp_ms: int) -> Effect:
        run = Run(record.slot, record.epoch)
        if record.attempt != self.attempt or self.end is not None:
            return Effect.IGNORED  # that run is over by its own word
        if self.run is None:
            self.run = run
        elif run != self.run:
            return Effect.IGNORED
        self.last_sign_at, self.prefill = timestamp_ms, None
        if self.gap is not None:
            return Effect.IGNORED
        if record.output_tokens != len(self.token_ids):
            self.gap = Gap(len(self.token_ids), record.output_tokens)
            return Effect.GAP
        self.end = record
        return Effect.ENDED

    def _retry(self, record: Retry) -> Effect:
        if record.attempt != self.attempt + 1 or not self.may_retry or not self._is_owner(record.owner_epoch):
            return Effect.IGNORED
        lost = self.run
        if record.reason == PREFILL_LOST:
            if self.prefill is None:
                return Effect.KEPT
            lost = self.prefill
        self.attempt = record.attempt
        self.num_carried = len(self.token_ids)
        if lost is not None:
            self.lost.append(lost)
        self.run = self.prefill = self.gap = self.end = self.finish_reason = self.requests_offset = None
        return Effect.RETRIED

    def _detach(self, record: Detach) -> Effect:
        reader = (record.slot, record.epoch)
        count = self.readers.get(reader, 0)
        if count == 0:
            return Effect.IGNORED
        if count == 1:
            del self.readers[reader]
        else:
            self.readers[reader] = count - 1
        self.detach_ms = record.detach_ms
        return Effect.READERS

    def _stray(self, run: Run, attempt: int) -> Effect:
        # A run that has said Completion is over. Any other that still shows records wants a cancel.
        if attempt == self.attempt and run == self.run and isinstance(self.end, Completion):
            return Effect.IGNORED
        self.strays.add(run)
        return Effect.STRAY

    def _learn_owner(self, epoch: int) -> None:
        if self.owner_epoch is None:
            self.owner_epoch = epoch

    def _is_owner(self, epoch: int) -> bool:
        # Nobody but the owner speaks first: with none known yet, the speaker is it.
        self._learn_owner(epoch)
        return epoch == self.owner_epoch
