"""The requests this gateway owns, from acceptance to their end in the log (architecture §4). Pure.

What is true about a request is the fold over its reply partition; the owner adds what only it may say:
cancel, fail, retry, send again, and the sealed usage row (lifecycle.py).
"""

from collections.abc import Callable

from gateway.actions import Action, Announce
from gateway.ended_requests import EndedRequests
from gateway.lifecycle import Lifecycle
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader
from gateway.resend import admission_status
from gateway.restating import Restater
from gateway.suspicion import excluded_slots, lost_epochs
from schemas import topics
from schemas.fleet import FleetView
from schemas.priority import PriorityClass
from schemas.records import (
    Admitted,
    Attach,
    Cancellation,
    Claim,
    Detach,
    Dispatched,
    Duplicate,
    InferenceRequest,
    Rejected,
    Tokens,
)
from schemas.stream_state import Effect, ReplyRecord, Run, StreamState

_STOPPED_S = 0.7  # others think a gateway dead that is silent for a second


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


class Owner:
    """Decides; every method returns the actions to take, in order.

    `position(partition)`: in a reply partition, what lies before it was given. `on_over(owned)` is called
    once for each request that ends here, with its state as it ended. While `held`, nothing is done that
    another owner might have reason not to do: see `feel`. `kept_ms`: how long clients of a request that comes
    back from another owner have to come back as well.
    """

    def __init__(self, slot: int, epoch: int, shards: int, cancel_timeout_ms: int, kept_ms: int = 0) -> None:
        self.slot = slot
        self.epoch = epoch
        self.open: dict[bytes, OwnedRequest] = {}
        self._shards = shards
        self.held = False
        self.position: Callable[[int], int] = lambda partition: 0
        self.on_over: Callable[[OwnedRequest], None] = lambda owned: None
        self._life = Lifecycle(slot, epoch, cancel_timeout_ms, kept_ms)
        self._restater = Restater(slot, epoch)
        self._ticked_at = 0.0
        self._deferred: list[tuple[OwnedRequest, list[Action]]] = []
        self._view = FleetView()
        self._ended = EndedRequests()

    def accept(
        self, request: InferenceRequest, reader: Reader, traceparent: str | None = None
    ) -> OwnedRequest:
        """Takes a request that is about to be sent."""
        partition = topics.tenant_partition(request.tenant, request.priority, self._shards)
        state = StreamState(request.request_id, owner_epoch=self.epoch)
        reader.token_ids = state.token_ids
        owned = OwnedRequest(request, partition, reader, state, traceparent)
        owned.first_offset = self.position(request.reply_partition)
        self.open[request.request_id] = owned
        return owned

    def owned(
        self, request: InferenceRequest, state: StreamState, first_offset: int, traceparent: str | None
    ) -> OwnedRequest:
        """A request that was another owner's; nobody reads it through this object."""
        partition = topics.tenant_partition(request.tenant, request.priority, self._shards)
        owned = OwnedRequest(request, partition, None, state, traceparent, first_offset=first_offset)
        owned.cap()
        return owned

    def adopt(
        self, owned: OwnedRequest, timestamp_ms: int, kept_ms: int, stopped: Cancellation | None
    ) -> list[Action]:
        """Takes a request whose Claim by this owner was read back and counts.

        Its clients may come back for `kept_ms`, or for as long as it may go on unread if that is more.
        `stopped`: a client, or its owner, has asked for the end.
        """
        state, clock = owned.state, self._life.clock
        owned.kept_until = clock + kept_ms
        unwanted = kept_ms == 0 and owned.detach_ms == state.detach_ms == 0 and not state.readers
        reason = "disconnected" if unwanted else None
        owned.cancelled = reason if stopped is None else stopped.reason
        owned.waived = stopped is not None and stopped.waived
        owned.cancelled_clock = clock
        self.open[state.request_id] = owned
        actions: list[Action] = []
        self._life.take_over(owned, timestamp_ms, actions)
        owned.request.lost_epochs = lost_epochs(owned, self._view)
        owned.request.excluded_slots = excluded_slots(owned, self.open.values(), self._view)
        if owned.over:
            self._forget(owned)
        return actions

    def knows(self, request_id: bytes) -> bool:
        """Open here, or ended within the last minute."""
        return request_id in self.open or request_id in self._ended

    def oldest(self, partition: int) -> int | None:
        """Where the first request begins, in a reply partition, that may need an owner; None if none does."""
        offsets = [o.first_offset for o in self.open.values() if o.request.reply_partition == partition]
        return min(offsets + self._ended.unbilled_offsets(partition, self._life.clock), default=None)

    def feel(self, now: float) -> bool:
        """False if this process may have been stopped for long enough to be thought dead. `now`: monotonic s.

        Others may have taken its requests over meanwhile: who drives this reads the reply partitions to their
        end and then sets `held` back.
        """
        if self._ticked_at and now - self._ticked_at >= _STOPPED_S:
            self.held = True
        return not self.held

    def on_sent(self, owned: OwnedRequest, offset: int) -> None:
        """The broker has the request's record."""
        owned.offset, owned.read_clock = offset, None

    def cancel(self, owned: OwnedRequest, reason: str, *, told: bool = False) -> list[Action]:
        """Stops the work. Who reads is told when the log says the end. `told`: the log says why already."""
        return self._life.cancel(owned, reason, told=told)

    def abandon(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """The client is gone, or was given up: stop the work. The state stays until the log says the end."""
        return self._life.abandon(owned, reason)

    def leave(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """The client is gone. The request goes on while others read it, and for its detach time."""
        if not self._life.owns(owned):
            owned.reader = None
            word = Detach(owned.request.request_id, self.slot, self.epoch, owned.detach_ms)
            return [Announce(word, owned.request.reply_partition)]
        if owned.detach_ms == 0 and not owned.state.readers and not self.held:
            return self.abandon(owned, reason)
        owned.reader = None
        return []

    def waive(self, owned: OwnedRequest, reason: str, now_ms: int) -> list[Action]:
        """Its client was refused: it costs nothing, whatever was done, and its Idempotency-Key is free again.

        Stop it as well, if it goes on. `now_ms`: ms of the epoch.
        """
        if owned.joined is not None or isinstance(owned.state.end, Rejected):
            return []  # it did nothing
        owned.waived = True
        cancel = owned.cancellation(reason)
        # 1. Who takes it over knows; and nobody waits for it.
        actions: list[Action] = [Announce(cancel.record, owned.request.reply_partition)]
        # 2. One that goes on is stopped, its key freed, and is billed when it ends.
        if cancel.record.key is not None and (owned.over or owned.cancelled is not None):
            actions.append(cancel)
        if owned.over:
            actions.append(owned.sealed_usage("cancelled", now_ms))
        return actions

    def part(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """This gateway stops: what nobody else reads and nobody may come back to is cancelled."""
        owned.reader = None
        kept = self._life.clock < owned.kept_until or bool(owned.detach_ms or owned.state.detach_ms)
        if kept or owned.state.readers or not self._life.owns(owned):
            return []
        return self.abandon(owned, reason)

    def on_cancellation(self, record: Cancellation) -> list[Action]:
        """In a reply partition: a client asked another gateway for the end, or an owner says it."""
        owned = self.open.get(record.request_id)
        if owned is None or owned.request.tenant != record.tenant:
            return []
        owned.waived = owned.waived or record.waived
        actions = self.cancel(owned, record.reason, told=True)
        # Another's is not ours to stop, but an early end is one, and nothing to be tried again.
        return actions if self._life.owns(owned) else []

    def on_duplicate(self, record: Duplicate) -> OwnedRequest | None:
        """Admission: another request with its Idempotency-Key was first. It is over, and cost nothing."""
        owned = self.open.get(record.request_id)
        if owned is None or owned.state.run is not None:
            return None
        owned.over = True
        self._forget(owned)
        return owned

    def on_tokens(self, record: Tokens, timestamp_ms: int, now: float) -> list[Action]:
        """`now`: monotonic seconds, for the clients' timing. The hot path."""
        actions: list[Action] = []
        run = Run(record.slot, record.epoch)
        find = self.open.get
        for chunk in record.chunks:
            owned = find(chunk.request_id)
            if owned is None:
                ended = self._ended.stray(chunk.request_id, run, chunk.attempt)
                if ended is not None:
                    self._life.cancel_stray(ended, run, chunk.attempt, actions)
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
                if reader.told is not None:
                    logprobs = chunk.logprobs[before - chunk.position :]
                    reader.told.add(token_ids[before:], logprobs, chunk.finish_reason)
                reader.on_tokens(len(token_ids), chunk.finish_reason, now)
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
        if isinstance(record, Admitted | Dispatched | Rejected) and record.rate_limits:
            found.rate_limits = record.rate_limits
        effect = found.state.apply(record, timestamp_ms)
        if isinstance(record, Attach):
            return self._life.tell_why(found)
        if effect is Effect.ENDED and still_open is None:
            # Our own Failed, behind a Completion that we took for the end: told and billed already.
            return actions
        run, attempt = None, found.state.attempt
        if isinstance(record, Dispatched):
            run, attempt = Run(record.slot, record.epoch), record.attempt
            found.cap()
        self._on_effect(found, effect, run, attempt, timestamp_ms, actions)
        return actions

    def tick(self, view: FleetView, now_ms: int, now: float) -> list[Action]:
        """Ten times a second: all that goes by time. `now_ms`: ms of the epoch; `now`: monotonic seconds."""
        self._view, self._life.clock = view, view.clock.now_ms
        self._ended.expire(self._life.clock)
        actions: list[Action] = []
        self._ticked_at = now
        if self._deferred and not self.held:
            for owned, deferred in self._deferred:
                actions += [a for a in deferred if self._life.owns(owned) or isinstance(a, Announce)]
            self._deferred.clear()
        admission = admission_status(view)
        if not self.held:
            # Before anything is sent again: who took a partition over waits for it.
            own = (owned for owned in self.open.values() if self._life.owns(owned))
            actions += self._restater.answers(admission, own, now_ms)
        if not self.open:
            return actions
        for owned in list(self.open.values()):
            if owned.reader is not None:
                owned.reader.on_quiet(now)
            if not (self.held or owned.failing or owned.retrying):
                actions += self._life.check(owned, view, admission, now_ms)
                if owned.over:
                    self._forget(owned)
        return actions

    def _on_effect(
        self,
        owned: OwnedRequest,
        effect: Effect,
        run: Run | None,
        attempt: int,
        timestamp_ms: int,
        actions: list[Action],
    ) -> None:
        if self.held:
            # What comes further on in the log may be that another owns it.
            actions = []
            self._deferred.append((owned, actions))
        self._life.on_effect(owned, effect, run, attempt, timestamp_ms, actions)
        if effect is Effect.RETRIED:
            owned.request.lost_epochs = lost_epochs(owned, self._view)
            owned.request.excluded_slots = excluded_slots(owned, self.open.values(), self._view)
        if owned.over and owned.request.request_id in self.open:
            self._forget(owned)

    def _forget(self, owned: OwnedRequest) -> None:
        """Off the open ones; remembered a while, for runs that still show records are to be cancelled."""
        if owned.state.end is not None and self._life.owns(owned):
            self.on_over(owned)
        del self.open[owned.request.request_id]
        self._ended.put(owned, self._life.clock)
