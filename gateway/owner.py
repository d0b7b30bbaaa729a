"""The requests this gateway owns, from acceptance to their end in the log (architecture §4). Pure.

What is true about a request is the fold over its reply partition; the owner adds what only it may say:
cancel, fail, retry, send again, and the sealed usage row. It acts on its own `Retry` and `Failed` only after
reading them back, so a Completion that came first wins.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from gateway.actions import Action, Reply, SendRequest
from gateway.attendance import abandoned
from gateway.ends import error_of
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader
from schemas import topics
from schemas.api.errors import ApiError
from schemas.fleet import LEFT_CANARY_FAILED, FleetView
from schemas.priority import PriorityClass
from schemas.records import (
    Cancellation,
    Claim,
    Completion,
    Dispatched,
    Failed,
    InferenceRequest,
    PartitionStatus,
    Rejected,
    Retry,
    Tokens,
)
from schemas.stream_state import RETRYABLE_FINISHES, Effect, ReplyRecord, Run, StreamState

NO_SIGN_MS = 3_000
NO_ANSWER_MS = 1_000
MAX_RESENDS = 3
MAX_RETRIES = 3
_ENDED_KEPT_MS = 60_000
_STRAY_CANCEL_MS = 1_000
_LEFT_WRONG = f"left: {LEFT_CANARY_FAILED}"


def reply_partition(gateway_slot: int, priority: int) -> int:
    """Where the fold of an online request of this gateway lies.

    The class-2 partitions of inference.tokens belong to the batch coordinators, so an online request of
    class batch replies on the gateway's class-1 partition: nothing reads a request's class off its reply
    partition.
    """
    return topics.partition(gateway_slot, min(priority, PriorityClass.FREE))


def reply_partitions(gateway_slot: int) -> tuple[int, ...]:
    """All that a gateway reads."""
    return tuple(sorted({reply_partition(gateway_slot, c) for c in PriorityClass}))


def should_send_again(
    offset: int, admitted_offset: int | None, status: PartitionStatus, since_read_ms: int
) -> bool:
    """The same attempt must go to admission once more; for a request without a run.

    Decided by offsets. An admission process that took the partition over skipped what lies before its
    takeover offset. What it has read and not answered for 1 s was lost on the way.
    `since_read_ms`: log clock since its read offset was first seen above `offset`.
    """
    if status.takeover_offset > offset:
        return True
    answered = admitted_offset is not None and admitted_offset >= offset
    return status.read_offset > offset and not answered and since_read_ms >= NO_ANSWER_MS


class Owner:
    """Decides; every method returns the actions to take, in order."""

    def __init__(self, slot: int, epoch: int, shards: int, cancel_timeout_ms: int) -> None:
        self.slot = slot
        self.epoch = epoch
        self.open: dict[bytes, OwnedRequest] = {}
        self._shards = shards
        self._cancel_timeout_ms = cancel_timeout_ms
        self._clock = 0
        self._ended: dict[bytes, OwnedRequest] = {}
        self._ended_order: deque[tuple[int, bytes]] = deque()

    def accept(
        self, request: InferenceRequest, reader: Reader, traceparent: str | None = None
    ) -> OwnedRequest:
        """Takes a request that is about to be sent."""
        partition = topics.tenant_partition(request.tenant, request.priority, self._shards)
        state = StreamState(request.request_id, owner_epoch=self.epoch)
        owned = OwnedRequest(request, partition, reader, state, traceparent)
        self.open[request.request_id] = owned
        return owned

    def on_sent(self, owned: OwnedRequest, offset: int) -> None:
        """The broker has the request's record."""
        owned.offset, owned.read_clock = offset, None

    def abandon(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """The client is gone, or was given up: stop the work. The state stays until the log says the end."""
        owned.reader = None
        return self.cancel(owned, reason)

    def leave(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """The client is gone. The request goes on while others read it, and for its detach time."""
        if owned.detach_ms == 0 and not owned.state.readers:
            return self.abandon(owned, reason)
        owned.reader = None
        return []

    def on_cancellation(self, record: Cancellation) -> list[Action]:
        """In a reply partition: a client asked another gateway for the end."""
        owned = self.open.get(record.request_id)
        if owned is None or owned.request.tenant != record.tenant:
            return []
        return self.cancel(owned, record.reason)

    def cancel(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """Stops the work. Who reads is told when the log says the end."""
        if owned.cancelled is not None or owned.request.request_id not in self.open:
            return []
        owned.cancelled, owned.cancelled_clock = reason, self._clock
        return [owned.cancellation(reason)]

    def on_tokens(self, record: Tokens, timestamp_ms: int, now: float) -> list[Action]:
        """`now`: monotonic seconds, for the clients' timing. The hot path."""
        actions: list[Action] = []
        run = Run(record.slot, record.epoch)
        find = self.open.get
        for chunk in record.chunks:
            owned = find(chunk.request_id)
            if owned is None:
                self._on_ended_chunk(self._ended.get(chunk.request_id), run, chunk.attempt, actions)
                continue
            state = owned.state
            token_ids = state.token_ids
            before = len(token_ids)
            effect = state.apply_chunk(run, chunk, timestamp_ms)
            if effect is Effect.TOKENS:
                reader = owned.reader
                if reader is None:
                    continue
                if not reader.bound:
                    reader.on_bound(state.model)
                new = chunk.token_ids if chunk.position == before else token_ids[before:]
                if reader.told is not None:
                    reader.told.add(new, chunk.logprobs[before - chunk.position :], chunk.finish_reason)
                if not reader.on_tokens(new, len(token_ids), chunk.finish_reason, now):
                    slow = ApiError(408, "slow_reader", "the client reads too slowly; the stream was ended")
                    reader.on_end(slow)
                    actions += self.leave(owned, "slow_reader")
            elif effect is not Effect.ALIVE and effect is not Effect.IGNORED:
                self._on_effect(owned, effect, run, chunk.attempt, timestamp_ms, actions)
        return actions

    def on_record(self, record: ReplyRecord, timestamp_ms: int) -> list[Action]:
        """Any other record of the reply partitions."""
        actions: list[Action] = []
        if isinstance(record, Claim) and record.request_id is None:
            for owned in self.open.values():
                owned.state.apply(record, timestamp_ms)
            return actions
        assert record.request_id is not None
        still_open = self.open.get(record.request_id)
        found = still_open or self._ended.get(record.request_id)
        if found is None:
            return actions
        effect = found.state.apply(record, timestamp_ms)
        if effect is Effect.ENDED and still_open is None:
            # Our own Failed, behind a Completion that we took for the end: told and billed already.
            return actions
        run, attempt = None, found.state.attempt
        if isinstance(record, Dispatched):
            run, attempt = Run(record.slot, record.epoch), record.attempt
        self._on_effect(found, effect, run, attempt, timestamp_ms, actions)
        return actions

    def tick(self, view: FleetView, now_ms: int, now: float) -> list[Action]:
        """Ten times a second: all that goes by time. `now_ms`: ms of the epoch; `now`: monotonic seconds."""
        self._clock = view.clock.now_ms
        while self._ended_order and self._clock - self._ended_order[0][0] >= _ENDED_KEPT_MS:
            self._ended.pop(self._ended_order.popleft()[1], None)
        actions: list[Action] = []
        if not self.open:
            return actions
        admission = _admission_status(view)
        for owned in list(self.open.values()):
            if owned.reader is not None:
                owned.reader.on_quiet(now)
            if not (owned.failing or owned.retrying):
                actions += self._check(owned, view, admission, now_ms)
        return actions

    def _check(
        self, owned: OwnedRequest, view: FleetView, admission: Mapping[int, PartitionStatus], now_ms: int
    ) -> list[Action]:
        request, run = owned.request, owned.state.run
        if owned.cancelled is not None:
            if self._clock - owned.cancelled_clock >= self._cancel_timeout_ms:
                return self._fail(owned, "cancelled", "cancelled; its end did not come in time")
        elif now_ms - request.accepted_at >= request.end_ms:
            if owned.reader is not None:
                message = f"not finished within {request.end_ms / 1000:g} s"
                owned.reader.on_end(ApiError(504, "deadline_exceeded", message))
            return self.abandon(owned, "deadline_exceeded")
        elif abandoned(owned, view, self._clock):
            return self.abandon(owned, "disconnected")
        if run is not None:
            return self._check_run(owned, run, view)
        status = admission.get(owned.partition)
        if status is None or owned.offset is None or owned.cancelled is not None:
            return []
        if owned.read_clock is None and status.read_offset > owned.offset:
            owned.read_clock = self._clock
        since_read = 0 if owned.read_clock is None else self._clock - owned.read_clock
        if not should_send_again(owned.offset, owned.state.requests_offset, status, since_read):
            return []
        if owned.resends >= MAX_RESENDS:
            return self._fail(
                owned, "no_answer", "the request was sent four times without an answer; try again"
            )
        owned.resends += 1
        owned.offset = owned.read_clock = None
        return [SendRequest(owned)]

    def _check_run(self, owned: OwnedRequest, run: Run, view: FleetView) -> list[Action]:
        if owned.sign_clock is None or owned.sign_at != owned.state.last_sign_at:
            owned.sign_at, owned.sign_clock = owned.state.last_sign_at, self._clock
        why = view.gone("worker", run.slot, run.epoch)
        if why is None and view.may_judge and self._clock - owned.sign_clock >= NO_SIGN_MS:
            why = "gives no sign of this request"
        if why is None:
            return []
        message = f"the worker that ran this request was lost ({why})"
        if why == _LEFT_WRONG and owned.state.token_ids:
            # What was told may be wrong already: nothing is built on it.
            return self._fail(owned, "worker_lost", message)
        return self._lose(owned, "worker_lost", message)

    def _on_effect(
        self,
        owned: OwnedRequest,
        effect: Effect,
        run: Run | None,
        attempt: int,
        timestamp_ms: int,
        actions: list[Action],
    ) -> None:
        match effect:
            case Effect.BOUND:
                if owned.reader is not None:
                    owned.reader.on_bound(owned.state.model)
            case Effect.GAP:
                actions += self._lose(owned, "output_gap", "a part of the output was lost")
            case Effect.RETRIED:
                self._on_retried(owned, actions)
            case Effect.STRAY:
                assert run is not None
                self._cancel_stray(owned, run, attempt, actions)
            case Effect.ENDED:
                self._on_end(owned, timestamp_ms, actions)

    def _on_end(self, owned: OwnedRequest, timestamp_ms: int, actions: list[Action]) -> None:
        end = owned.state.end
        match end:
            case Completion():
                if end.finish_reason in RETRYABLE_FINISHES and (owned.retrying or owned.cancelled is None):
                    # Only the attempt is over.
                    text = end.message or "the worker cancelled this request"
                    if end.finish_reason == "error":
                        actions += self._fail(owned, "engine_error", text)
                    else:
                        actions += self._lose(owned, "worker_cancelled", text)
                    return
                if owned.state.strays:
                    actions.append(owned.sealed_usage(end.finish_reason, timestamp_ms, end.cached_tokens))
                if owned.reader is not None:
                    owned.reader.on_end(end)
            case Rejected():
                if end.status == 499 or owned.state.strays or owned.state.attempt > 1:
                    actions.append(
                        owned.sealed_usage("cancelled" if end.status == 499 else "error", timestamp_ms)
                    )
                if owned.reader is not None:
                    owned.reader.on_end(error_of(end))
            case Failed():
                actions.append(
                    owned.sealed_usage("cancelled" if end.code == "cancelled" else "error", timestamp_ms)
                )
                if owned.reader is not None:
                    owned.reader.on_end(error_of(end))
        self._forget(owned)

    def _forget(self, owned: OwnedRequest) -> None:
        """Off the open ones; remembered a while, for runs that still show records are to be cancelled."""
        request_id = owned.request.request_id
        del self.open[request_id]
        owned.state.token_ids.clear()
        owned.request.prompt_token_ids.clear()
        self._ended[request_id] = owned
        self._ended_order.append((self._clock, request_id))

    def _on_ended_chunk(
        self, owned: OwnedRequest | None, run: Run, attempt: int, actions: list[Action]
    ) -> None:
        if owned is None:
            return
        end = owned.state.end
        if isinstance(end, Completion) and run == owned.state.run and attempt == owned.state.attempt:
            return
        self._cancel_stray(owned, run, attempt, actions)

    def _cancel_stray(self, owned: OwnedRequest, run: Run, attempt: int, actions: list[Action]) -> None:
        last = owned.stray_cancels.get(run)
        if last is not None and self._clock - last < _STRAY_CANCEL_MS:
            return
        owned.stray_cancels[run] = self._clock
        actions.append(owned.stray_cancellation(run, attempt))

    def _lose(self, owned: OwnedRequest, code: str, message: str) -> list[Action]:
        """The attempt is over, the request is not: another one goes on where it stopped, if it may."""
        if owned.retrying or owned.failing:
            return []
        request, attempt = owned.request, owned.state.attempt
        if owned.cancelled is not None or attempt > MAX_RETRIES:
            return self._fail(owned, code, message)
        owned.retrying = True
        retry = Retry(request.request_id, attempt + 1, self.epoch, code)
        return [Reply(retry, request.reply_partition), owned.cancellation(code)]

    def _on_retried(self, owned: OwnedRequest, actions: list[Action]) -> None:
        owned.retrying = False
        if owned.cancelled is not None:
            actions += self._fail(owned, "cancelled", "cancelled while another attempt was to begin")
            return
        owned.begin_attempt()
        actions.append(SendRequest(owned))

    def _fail(self, owned: OwnedRequest, code: str, message: str) -> list[Action]:
        """Says the end. It is one when it is read back and nothing else was first."""
        if owned.failing or owned.retrying:
            return []
        owned.failing = True
        if owned.cancelled is not None:
            code = "cancelled"
        request, state = owned.request, owned.state
        failed = Failed(request.request_id, state.attempt, self.epoch, code, message)
        return [Reply(failed, request.reply_partition), owned.cancellation(code)]


def _admission_status(view: FleetView) -> dict[int, PartitionStatus]:
    """Per partition the word of who took it over last."""
    found: dict[int, PartitionStatus] = {}
    for member in view.live("admission"):
        statuses: Iterable[PartitionStatus] = () if member.heartbeat is None else member.heartbeat.partitions
        for status in statuses:
            known = found.get(status.partition)
            if known is None or status.takeover_offset >= known.takeover_offset:
                found[status.partition] = status
    return found
