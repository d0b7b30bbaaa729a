"""The owner of one shard's batch requests: what to send, retry, seal and answer. Pure.

Everything about a request is told in the shard's reply partition, and its state is the fold of that
(schemas/stream_state.py). This class is fed with the partition's records in order, with the tenants'
requests, and with the time; it answers with actions. It sends nothing itself, and acts on its own Retry
and Failed only when they are read back: a Completion that came first wins.

One rule is added to the fold: a refusal for now (429, 503) ends nothing. The request goes out again as
the same attempt, so limits stay in force for it. A successor that folds the partition does the same.
"""

from collections.abc import Collection, Mapping

from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.priority import PriorityClass
from schemas.records import (
    Claim,
    Completion,
    Failed,
    Rejected,
    Retry,
    Tokens,
)
from schemas.stream_state import (
    PREFILL_LOST,
    RETRYABLE_FINISHES,
    Effect,
    ReplyRecord,
    Run,
    StreamState,
)
from schemas.topics import partition
from streams.ledger.batch_actions import (
    Action,
    AdmissionOffsets,
    Answer,
    SendRequest,
)
from streams.ledger.batch_answers import BatchAnswers
from streams.ledger.batch_item import BatchItem, FileSource, Source
from streams.ledger.batch_outcome import (
    EXPIRED,
    TOO_LARGE,
    choice_end,
    failed,
    finished,
    refused,
    reopen,
    told_usage,
)
from streams.ledger.batch_recovery import Recovery
from streams.ledger.batch_resend import Resend, resend
from streams.ledger.ended_items import EndedItems
from streams.ledger.open_line import OpenLine, Outcome
from streams.ledger.open_request import FIRST_BACKOFF_MS, OpenRequest, Phase
from streams.ledger.owner_word import MAX_RETRIES, OwnerWord
from streams.ledger.restating import Restater

# Workers name every live sequence once a second. Batch work is in no hurry to give one up.
SILENCE_MS = 10_000
# A request that was cancelled and does not end ends here: its run is dead or will be.
STOP_MS = 10_000
# Admission ends what waits too long; only if it does not, the owner does.
EXPIRY_GRACE_MS = 60_000
# Within this all processes know of a change to a tenant.
IN_FORCE_MS = 2_000


class BatchShard:
    """`position` is the next offset of the reply partition to be read, `answers` what waits to go out,
    `recovery` what earlier lives began and this one has not met, `refused_until` by tenant when the last of
    its requests that were refused for now goes out again."""

    def __init__(self, shard: int, slot: int, epoch: int, *, end_ms: int, position: int, now_ms: int) -> None:
        self.reply_partition = partition(shard, PriorityClass.BATCH)
        self.position = position
        self.answers = BatchAnswers()
        self.refused_until: dict[str, int] = {}
        self._epoch, self._end_ms = epoch, end_ms
        self._word = OwnerWord(slot, epoch)
        self._open: dict[bytes, OpenRequest] = {}
        self._lines: dict[bytes, OpenLine] = {}
        self._restater = Restater(shard, epoch, end_ms)
        self.recovery = Recovery(now_ms)
        self._ended_items = EndedItems()
        self._ticked_ms = now_ms

    @property
    def open(self) -> int:
        return len(self._open)

    def requests(self) -> Collection[OpenRequest]:
        """All that are open."""
        return self._open.values()

    @property
    def resume_offset(self) -> int:
        """Where a successor must begin to read the reply partition."""
        places = [line.since for line in self._lines.values()]
        places += [low for low in (self.answers.low, self.recovery.low) if low is not None]
        return min(places, default=self.position)

    def claims(self) -> list[Action]:
        """After recovery: takes over what earlier lives left open."""
        return self._word.claims(self.recovery.owner_epochs())

    def accept(self, item: BatchItem, now_ms: int, clock_ms: int) -> list[Action]:
        """Takes a line read from its topic or file."""
        known = self._lines.get(item.request_id)
        if known is not None:
            known.sources.append(item.source)
            return []
        if self.answers.again(item):
            return []
        line = self._lines[item.request_id] = OpenLine(item, self.position, [item.source])
        actions: list[Action] = []
        for choice in item.requests():
            request = OpenRequest(choice, StreamState(choice.request_id), line, due_at=now_ms)
            self._open[choice.request_id] = request
            actions += self._begin(request, now_ms, clock_ms)
        return [*actions, *self._stop_others(line, now_ms)]

    def _begin(self, request: OpenRequest, now_ms: int, clock_ms: int) -> list[Action]:
        if not self.recovery.recall(request, clock_ms):
            return self._send(request)
        state = request.state
        if state.end is not None:
            request.transition_to(Phase.SENT)
            return self._ended(request, now_ms)
        if state.run is None and state.requests_offset is None:
            return self._send(request)
        request.sent_offset = state.requests_offset
        request.transition_to(Phase.SENT)
        return []

    def has(self, request_id: bytes) -> bool:
        """Whether the line is open, or its answer is remembered here."""
        return request_id in self._lines or self.answers.remembers(request_id)

    def repeat(self, item: BatchItem, value: bytes) -> None:
        """Answers a record that a producer wrote again with what the first one was answered with."""
        assert isinstance(item.source, Source)
        for request_id in item.request_ids():
            self.recovery.take(request_id)
        self.answers.topic.append(Answer(item.source, value, ok=True, request_id=item.request_id))

    def on_sent(self, request_id: bytes, attempt: int, offset: int) -> None:
        """The broker acked a SendRequest."""
        request = self._open.get(request_id)
        if request is not None and request.state.attempt == attempt:
            request.sent_offset = max(offset, request.sent_offset or 0)

    def on_too_large(self, request_id: bytes, attempt: int) -> None:
        """No broker will ack a SendRequest."""
        request = self._open.get(request_id)
        if request is not None and request.state.attempt == attempt:
            request.oversized = True

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
                    effect = request.apply_chunk(run, chunk, timestamp_ms)
                    actions += self._act(request, effect, now_ms, clock_ms)
                elif chunk.request_id in self._ended_items:
                    actions += self._ended_items.shown(chunk.request_id, run, chunk.attempt)
                elif not self.answers.remembers(chunk.request_id):
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
            if rid in self._ended_items:
                return self._ended_items.on_record(rid, record)
            if not self.answers.remembers(rid):
                self.recovery.apply(record, offset, timestamp_ms)
            return []
        effect = request.state.apply(record, timestamp_ms)
        own = isinstance(record, Retry | Failed) and record.owner_epoch == self._epoch
        too_late = effect in (Effect.IGNORED, Effect.KEPT)
        if own and too_late and request.phase in (Phase.RETRYING, Phase.FAILING):
            request.transition_to(Phase.SENT)  # something came first: judge again
        return self._act(request, effect, now_ms, clock_ms)

    def cancel(self, batch_id: str, error: ApiError, now_ms: int) -> list[Action]:
        """Ends the open items of a job: with their answer where that comes first, else with `error`."""
        sources = ((request, request.item.source) for request in self._open.values())
        of_job = [r for r, s in sources if isinstance(s, FileSource) and s.batch_id == batch_id]
        return self._word.stop(of_job, error, now_ms)

    def _stop_others(self, line: OpenLine, now_ms: int) -> list[Action]:
        """One choice of it has no answer: the others have no use."""
        if line.error is None:
            return []
        others = [self._open[rid] for rid in line.item.request_ids() if rid in self._open]
        return self._word.stop(others, line.error, now_ms)

    def rules_changed(self, tenants: Collection[str], now_ms: int) -> None:
        """What was refused for now goes out again once admission knows of the change too."""
        due_at = now_ms + IN_FORCE_MS
        self.refused_until |= dict.fromkeys(self.refused_until.keys() & tenants, due_at)
        for request in self._open.values():
            if request.item.source.tenant in tenants:
                request.hurry(due_at)

    def tick(self, now_ms: int, fleet: FleetView, admission: Mapping[int, AdmissionOffsets]) -> list[Action]:
        """`admission`: by partition of inference.requests."""
        actions = self._restater.answers(admission, self._open.values(), now_ms)
        for request in list(self._open.values()):
            actions += self._look_at(request, now_ms, fleet, admission)
        self.recovery.expire(now_ms)
        self._ticked_ms = now_ms
        self._ended_items.expire(now_ms)
        return actions

    def _look_at(
        self, request: OpenRequest, now_ms: int, fleet: FleetView, admission: Mapping[int, AdmissionOffsets]
    ) -> list[Action]:
        state, age = request.state, now_ms - request.item.accepted_at
        end_ms = request.item.end_ms or self._end_ms
        if request.stopped is not None:
            over = now_ms - request.stopped_at >= STOP_MS
            return self._finish(request, request.stopped) if over else []
        if request.phase is Phase.WAITING:
            if age >= end_ms:
                return self._word.end(request, EXPIRED)
            return self._send(request) if now_ms >= request.due_at else []
        if request.phase is not Phase.SENT:
            return []
        if request.oversized:
            return self._word.end(request, TOO_LARGE)
        if state.run is not None:
            reason = fleet.gone("worker", *state.run)
            if reason is None and fleet.may_judge and fleet.clock.now_ms - request.sign_ms >= SILENCE_MS:
                reason = "no sign of the run"
            if reason is not None:
                return self._retry(request, f"worker: {reason}")
            if state.prefill is None or state.attempt > MAX_RETRIES:
                return []  # of the last attempt the bound run may have heard all the same
            return self._retry(request, PREFILL_LOST) if fleet.gone("worker", *state.prefill) else []
        if age >= end_ms + EXPIRY_GRACE_MS:
            return self._word.end(request, EXPIRED)
        # The tenants of a shard are those whose requests hash to it: both partitions have the same number.
        match resend(request, admission.get(self.reply_partition), now_ms):
            case Resend.SEND:
                return self._send(request)
            case Resend.BACK_OFF:
                request.back_off(now_ms, 0)
        return []

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
                return [*request.stray_stops()]
            case Effect.GAP:
                return self._retry(request, "gap in the tokens")
            case Effect.RETRIED:
                if request.stopped is not None:
                    return self._finish(request, request.stopped)
                request.due_at = now_ms
                if request.phase is not Phase.WAITING:
                    request.transition_to(Phase.WAITING)
                return self._send(request)
            case Effect.ENDED:
                return self._ended(request, now_ms)
        return []

    def _ended(self, request: OpenRequest, now_ms: int) -> list[Action]:
        end = request.state.end
        answered = isinstance(end, Completion) and end.finish_reason not in RETRYABLE_FINISHES
        if request.stopped is not None and not answered:
            return self._finish(request, request.stopped)
        if isinstance(end, Rejected):
            if reopen(request.state):
                request.back_off(now_ms, end.retry_after_ms or 0)
                tenant = request.item.source.tenant
                self.refused_until[tenant] = max(request.due_at, self.refused_until.get(tenant, 0))
                return []
            return self._finish(request, refused(end))
        if isinstance(end, Failed):
            return self._finish(request, failed(end))
        if isinstance(end, Completion):
            if end.finish_reason in RETRYABLE_FINISHES:
                reason = end.message or f"the worker ended it: {end.finish_reason}"
                return self._retry(request, reason)
            return self._finish(request, finished(request, end))
        return []

    def _retry(self, request: OpenRequest, reason: str) -> list[Action]:
        if request.stopped is not None:
            return self._finish(request, request.stopped)
        if request.phase in (Phase.RETRYING, Phase.FAILING):
            return []
        return self._word.retry(request, reason)

    def _send(self, request: OpenRequest) -> list[Action]:
        request.transition_to(Phase.SENT)
        request.sent_offset = request.unanswered_at = None
        request.state.requests_offset = None
        return [SendRequest(request.to_send(self.reply_partition, self._epoch, self._end_ms))]

    def _finish(self, request: OpenRequest, outcome: Outcome) -> list[Action]:
        request.transition_to(Phase.ENDED)
        line, rid, now_ms = request.line, request.item.request_id, self._ticked_ms
        del self._open[rid]
        end = choice_end(request, outcome)
        row = told_usage(request, outcome) if end.seal is None else None
        self._ended_items.put(request, row, now_ms)
        line_end = line.end(rid, end)
        if line_end is None:
            return self._stop_others(line, now_ms)
        del self._lines[line.item.request_id]
        self.answers.end(line, line_end)
        return []
