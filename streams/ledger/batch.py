"""The owner of one shard's batch requests: what to send, retry, seal and answer. Pure.

Everything about a request is told in the shard's reply partition, and its state is the fold of that
(schemas/stream_state.py). This class is fed with the partition's records in order, with the tenants'
requests, and with the time; it answers with actions. It sends nothing itself, and acts on its own Retry
and Failed only when they are read back: a Completion that came first wins.

One rule is added to the fold: a refusal for now (429, 503) ends nothing. The request goes out again as
the same attempt, so limits stay in force for it. A successor that folds the partition does the same.
"""

from collections import OrderedDict
from collections.abc import Mapping

from schemas.api.answers import Finished
from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.priority import PriorityClass
from schemas.records import (
    Cancellation,
    Claim,
    Completion,
    Failed,
    Rejected,
    Retry,
    Tokens,
    Usage,
)
from schemas.stream_state import RETRYABLE_FINISHES, Effect, ReplyRecord, Run, StreamState
from schemas.topics import partition
from streams.ledger.batch_actions import (
    Action,
    AdmissionOffsets,
    Answer,
    Append,
    CancelRun,
    SendRequest,
)
from streams.ledger.batch_outcome import EXPIRED, Outcome, finished, refused, reopen, sealed_usage
from streams.ledger.batch_records import BatchItem, Source, encode_answer, encode_error
from streams.ledger.batch_recovery import Recovery
from streams.ledger.open_request import FIRST_BACKOFF_MS, OpenRequest, Phase
from streams.ledger.restating import Restater

MAX_RETRIES = 3
# Workers name every live sequence once a second. Batch work is in no hurry to give one up.
SILENCE_MS = 10_000
# Read by admission and no answer: send again after this, this many times, then as if refused.
UNANSWERED_MS = 1_000
MAX_RESENDS = 3
# Admission ends what waits too long; only if it does not, the owner does.
EXPIRY_GRACE_MS = 60_000
REMEMBERED = 2_000


class BatchShard:
    """`position` is the next offset of the reply partition to be read, `answers` what waits to go out,
    `recovery` what earlier lives began and this one has not met."""

    def __init__(
        self, shard: int, slot: int, epoch: int, *, end_ms: int, position: int, log_end: int, now_ms: int
    ) -> None:
        """`log_end`: the reply partition's end when this life began; records below it are recovery."""
        self.reply_partition = partition(shard, PriorityClass.BATCH)
        self.position = position
        self.answers: list[Answer] = []
        self._slot, self._epoch, self._end_ms = slot, epoch, end_ms
        self._open: dict[bytes, OpenRequest] = {}
        self._restater = Restater(shard, epoch, end_ms)
        self.recovery = Recovery(log_end, now_ms)
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def resume_offset(self) -> int:
        """Where a successor must begin to read the reply partition."""
        return min((request.since for request in self._open.values()), default=self.position)

    def claims(self) -> list[Action]:
        """After recovery: takes over what earlier lives left open."""
        return [
            Append(Claim(from_epoch=epoch, by_slot=self._slot, by_epoch=self._epoch))
            for epoch in sorted(self.recovery.owner_epochs() - {self._epoch})
        ]

    def accept(self, item: BatchItem, now_ms: int, clock_ms: int) -> list[Action]:
        """Takes a request read from its topic."""
        rid = item.request_id
        known = self._open.get(rid)
        if known is not None:
            known.sources.append(item.source)
            return []
        outcome = self._outcomes.get(rid)
        if outcome is not None:
            self._answer(item, item.source, outcome, None)
            return []
        recovered = self.recovery.take(rid)
        if recovered is None:
            request = OpenRequest(item, StreamState(rid), self.position, [item.source], due_at=now_ms)
            self._open[rid] = request
            return self._send(request)
        request = OpenRequest(item, recovered.state, recovered.since, [item.source], due_at=now_ms)
        request.sign_ms = clock_ms
        self._open[rid] = request
        state = request.state
        if state.end is not None:
            request.transition_to(Phase.SENT)
            return self._ended(request, now_ms)
        if state.run is None and state.requests_offset is None:
            return self._send(request)
        request.sent_offset, request.ran = state.requests_offset, state.run is not None
        request.transition_to(Phase.SENT)
        return []

    def refuse(self, source: Source, value: bytes) -> None:
        """Answers a record that is no request."""
        self.answers.append(Answer(source, value, ok=False))

    def on_sent(self, request_id: bytes, attempt: int, offset: int) -> None:
        """The broker acked a SendRequest."""
        request = self._open.get(request_id)
        if request is not None and request.state.attempt == attempt:
            request.sent_offset = max(offset, request.sent_offset or 0)

    def on_reply(
        self, record: ReplyRecord | Tokens, offset: int, timestamp_ms: int, now_ms: int, clock_ms: int
    ) -> list[Action]:
        """Takes the next record of the reply partition."""
        self.position = offset + 1
        if isinstance(record, Tokens):
            run = Run(record.slot, record.epoch)
            actions: list[Action] = []
            for chunk in record.chunks:
                request = self._open.get(chunk.request_id)
                if request is not None:
                    effect = request.state.apply_chunk(run, chunk, timestamp_ms)
                    actions += self._act(request, effect, now_ms, clock_ms)
                else:
                    self.recovery.apply_chunk(run, chunk, offset, timestamp_ms)
            return actions
        if isinstance(record, Claim) and record.request_id is None:
            for request in self._open.values():
                request.state.apply(record, timestamp_ms)
            self.recovery.apply(record, offset, timestamp_ms)
            return []
        rid = record.request_id
        assert rid is not None
        request = self._open.get(rid)
        if request is None:
            self.recovery.apply(record, offset, timestamp_ms)
            return []
        effect = request.state.apply(record, timestamp_ms)
        own = isinstance(record, Retry | Failed) and record.owner_epoch == self._epoch
        if own and effect is Effect.IGNORED and request.phase in (Phase.RETRYING, Phase.FAILING):
            request.transition_to(Phase.SENT)  # something came first: judge again
        return self._act(request, effect, now_ms, clock_ms)

    def tick(self, now_ms: int, fleet: FleetView, admission: Mapping[int, AdmissionOffsets]) -> list[Action]:
        """`admission`: by partition of inference.requests."""
        actions = self._restater.answers(admission, self._open.values(), now_ms)
        for request in list(self._open.values()):
            actions += self._look_at(request, now_ms, fleet, admission)
        self.recovery.expire(now_ms)
        return actions

    def _look_at(
        self, request: OpenRequest, now_ms: int, fleet: FleetView, admission: Mapping[int, AdmissionOffsets]
    ) -> list[Action]:
        state, age = request.state, now_ms - request.item.accepted_at
        if request.phase is Phase.WAITING:
            if age >= self._end_ms:
                self._finish(request, EXPIRED)
                return []
            return self._send(request) if now_ms >= request.due_at else []
        if request.phase is not Phase.SENT:
            return []
        if state.run is not None:
            reason = fleet.gone("worker", *state.run)
            if reason is None and fleet.may_judge and fleet.clock.now_ms - request.sign_ms >= SILENCE_MS:
                reason = "no sign of the run"
            return [] if reason is None else self._retry(request, f"worker: {reason}")
        if age >= self._end_ms + EXPIRY_GRACE_MS:
            self._finish(request, EXPIRED)
            return []
        return self._send_again(request, now_ms, admission)

    def _send_again(
        self, request: OpenRequest, now_ms: int, admission: Mapping[int, AdmissionOffsets]
    ) -> list[Action]:
        """Decided by offsets, not by a clock (architecture §4).

        The tenants of a coordinator's shard are those whose requests hash to that shard, so both
        partitions have the same number.
        """
        said = admission.get(self.reply_partition)
        if said is None or request.sent_offset is None:
            return []
        if request.sent_offset < said.takeover:
            return self._send(request)
        answered = request.state.requests_offset is not None
        if answered or said.read <= request.sent_offset:
            request.unanswered_at = None
            return []
        if request.unanswered_at is None:
            request.unanswered_at = now_ms
        if now_ms - request.unanswered_at < UNANSWERED_MS:
            return []
        if request.resends >= MAX_RESENDS:
            request.back_off(now_ms, 0)
            return []
        request.resends += 1
        return self._send(request)

    def _act(self, request: OpenRequest, effect: Effect, now_ms: int, clock_ms: int) -> list[Action]:
        match effect:
            case Effect.BOUND | Effect.TOKENS | Effect.ALIVE:
                request.sign_ms, request.ran = clock_ms, True
                request.backoff_ms, request.resends = FIRST_BACKOFF_MS, 0
                if request.phase is Phase.WAITING:  # it was taken after all
                    request.transition_to(Phase.SENT)
            case Effect.ADMITTED:
                request.sent_offset, request.resends = request.state.requests_offset, 0
                if request.phase is Phase.WAITING:
                    request.transition_to(Phase.SENT)
            case Effect.STRAY:
                return self._cancel_strays(request)
            case Effect.GAP:
                return self._retry(request, "gap in the tokens")
            case Effect.RETRIED:
                request.due_at = now_ms
                if request.phase is not Phase.WAITING:
                    request.transition_to(Phase.WAITING)
                return self._send(request)
            case Effect.ENDED:
                return self._ended(request, now_ms)
        return []

    def _ended(self, request: OpenRequest, now_ms: int) -> list[Action]:
        end = request.state.end
        if isinstance(end, Rejected):
            if reopen(request.state):
                request.back_off(now_ms, end.retry_after_ms or 0)
                return []
            self._finish(request, refused(end))
        elif isinstance(end, Failed):
            self._finish(request, ApiError(500, end.code, end.message))
        elif isinstance(end, Completion):
            if end.finish_reason in RETRYABLE_FINISHES:
                reason = end.message or f"the worker ended it: {end.finish_reason}"
                return self._retry(request, reason)
            self._finish(request, finished(request.item, request.state, end))
        return []

    def _retry(self, request: OpenRequest, reason: str) -> list[Action]:
        if request.phase in (Phase.RETRYING, Phase.FAILING):
            return []
        if request.phase is Phase.WAITING:
            request.transition_to(Phase.SENT)
        state, rid = request.state, request.item.request_id
        actions: list[Action] = []
        if state.owner_epoch not in (None, self._epoch):
            assert state.owner_epoch is not None
            actions.append(Append(Claim(state.owner_epoch, self._slot, self._epoch, rid)))
        if state.attempt > MAX_RETRIES:
            request.transition_to(Phase.FAILING)
            message = f"gave up after {MAX_RETRIES} retries; the last one: {reason}"
            actions.append(Append(Failed(rid, state.attempt, self._epoch, "worker_lost", message)))
        else:
            request.transition_to(Phase.RETRYING)
            actions.append(Append(Retry(rid, state.attempt + 1, self._epoch, reason)))
        return actions

    def _send(self, request: OpenRequest) -> list[Action]:
        request.transition_to(Phase.SENT)
        request.sent_offset = request.unanswered_at = None
        request.state.requests_offset = None
        return [SendRequest(request.to_send(self.reply_partition, self._epoch, self._end_ms))]

    def _cancel_strays(self, request: OpenRequest) -> list[Action]:
        state, item = request.state, request.item
        return [
            CancelRun(
                Cancellation(item.request_id, state.attempt, item.source.tenant, "stray", run.slot, run.epoch)
            )
            for run in request.new_strays()
        ]

    def _finish(self, request: OpenRequest, outcome: Outcome) -> None:
        request.transition_to(Phase.ENDED)
        seal = sealed_usage(request, outcome)
        for source in request.sources:
            self._answer(request.item, source, outcome, seal)
        del self._open[request.item.request_id]
        self._outcomes[request.item.request_id] = outcome
        if len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)

    def _answer(self, item: BatchItem, source: Source, outcome: Outcome, seal: Usage | None) -> None:
        if isinstance(outcome, ApiError):
            value = encode_error(source, item.request_id, outcome)
        else:
            value = encode_answer(source, item.request_id, item.url, outcome)
        self.answers.append(Answer(source, value, isinstance(outcome, Finished), seal))
