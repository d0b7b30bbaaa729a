"""What other owners left in the reply partitions of a gateway slot, and when this gateway claims it. Pure.

An `Estate` folds every request that is none of this gateway's own. When the owner of one is lost, and someone
reads it here or nobody else will see to it, it is claimed; once the claim is read back and counts, the
request goes over to `Owner`, state and all.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from gateway.actions import Action, Announce
from gateway.ended_requests import SETTLED_MS
from gateway.owned_request import OwnedRequest, sealed_by_owner
from gateway.owner import Owner
from gateway.replay import RETRY_WAIT_MS
from schemas.fleet import FleetView
from schemas.records import Cancellation, Claim, Failed, InferenceRequest, Tokens
from schemas.stream_state import Effect, ReplyRecord, Run, StreamState

FORGET_MS = 60_000
_CLAIM_AGAIN_MS = 2_000
IsLost = Callable[[int, int], bool]


@dataclass(slots=True, eq=False)
class Found:
    """A request of another owner. `first_offset`: nothing about it lies before. `*_clock`: log clock, ms.

    `request` is None until it was read back from inference.requests, with its `traceparent`. `settled`: there
    is nothing to do for who would take it over; `given_up`: its owner says no Retry. `stopped` are the words
    of those that asked for the end. `is_read`: some gateway that lives shows it to a client. `kept_ms`: how
    long its clients have to come back once it is claimed.
    """

    state: StreamState
    reply_partition: int
    first_offset: int
    seen_clock: int
    ended_at: int = 0
    request: InferenceRequest | None = None
    settled: bool = False
    stopped: list[Cancellation] = field(default_factory=list)
    claim_clock: int | None = None
    kept_ms: int = 0
    given_up: bool = False
    is_read: bool = False
    traceparent: str | None = None

    def is_waited_for(self, clock_ms: int) -> bool:
        """Another attempt is of use to somebody, or may be, while `request` is not known."""
        if self.stopped:
            return False
        if self.is_read or self.request is None:
            return True
        return clock_ms - self.seen_clock < max(self.request.detach_ms, self.state.detach_ms)

    @property
    def is_open(self) -> bool:
        """Its owner may have something left to say."""
        state = self.state
        if self.settled or state.request_at is None:
            return False
        waived = any(word.waived for word in self.stopped)
        return state.end is None or self.may_go_on or sealed_by_owner(state) or waived

    @property
    def is_over(self) -> bool:
        return self.state.end is not None and not self.may_go_on

    def stopped_for(self, tenant: str) -> Cancellation | None:
        """The word of its own tenant that asked for the end; one that waives it goes first."""
        words = [word for word in self.stopped if word.tenant == tenant]
        return next((word for word in words if word.waived), words[0] if words else None)

    @property
    def may_go_on(self) -> bool:
        """Its last attempt ended early, and there may be another."""
        return self.state.end is not None and self.state.may_retry and not self.given_up


class Estate:
    """`slot` is the gateway slot whose reply partitions are folded. Feed it all their records, in order."""

    def __init__(self, slot: int, owner: Owner) -> None:
        self.slot = slot
        self.found: dict[bytes, Found] = {}
        self.fed_clock = 0
        self._owner = owner

    def __iter__(self) -> Iterator[Found]:
        return iter(self.found.values())

    def on_record(
        self,
        record: Tokens | ReplyRecord | Cancellation,
        partition: int,
        offset: int,
        timestamp_ms: int,
        clock_ms: int,
    ) -> list[Action]:
        """What `owner` was given, and does not know, is folded here. `timestamp_ms`: broker time."""
        if isinstance(record, Tokens):
            run = Run(record.slot, record.epoch)
            for chunk in record.chunks:
                if not self._owner.knows(chunk.request_id):
                    found = self._find(chunk.request_id, partition, offset, clock_ms)
                    self._note(found, found.state.apply_chunk(run, chunk, timestamp_ms), timestamp_ms)
            return []
        if record.request_id is None or self._owner.knows(record.request_id):
            return []  # a claim of all there is: gateways claim one by one
        found = self._find(record.request_id, partition, offset, clock_ms)
        if isinstance(record, Cancellation):
            found.stopped.append(record)
            return []
        effect = found.state.apply(record, timestamp_ms)
        self._note(found, effect, timestamp_ms)
        if effect is not Effect.CLAIMED or found.state.owner_epoch != self._owner.epoch:
            return []
        request = found.request
        if request is None:
            return []  # by an earlier reading of this partition; claimed once more
        del self.found[request.request_id]
        owned = self._owner.owned(request, found.state, found.first_offset, found.traceparent)
        return self._owner.adopt(owned, timestamp_ms, found.kept_ms, found.stopped_for(request.tenant))

    def due(
        self, view: FleetView, *, read_here: Container[bytes], everything: bool, lost: IsLost, clock_ms: int
    ) -> list[Found]:
        """What is to be taken over now: its owner is lost, and it is read here, or `everything` is."""
        for found in self:
            found.is_read = any(view.gone("gateway", *reader) is None for reader in found.state.readers)
        return [
            found
            for request_id, found in self.found.items()
            if found.is_open
            and (everything or request_id in read_here)
            and (found.claim_clock is None or clock_ms - found.claim_clock >= _CLAIM_AGAIN_MS)
            and self._owner_is_lost(found, lost)
            and (not found.may_go_on or found.is_waited_for(clock_ms))
        ]

    def take(
        self, found: Found, request: InferenceRequest | None, clock_ms: int, kept_ms: int
    ) -> list[Action]:
        """A claim, or what the lost owner may not have sent behind the end: bill and cancels.
        `request` is what was read back."""
        state = found.state
        if request is None:
            found.settled = True  # no record of it: nothing can be sent or billed
            return []
        found.request, found.kept_ms = request, kept_ms
        if found.is_over:
            found.settled = True
            owned = self._owner.owned(request, state, found.first_offset, found.traceparent)
            stopped = found.stopped_for(request.tenant)
            owned.waived = stopped is not None and stopped.waived
            bill = owned.final_bill(found.ended_at)
            return [*_stops(owned), *([] if bill is None else [bill])]
        if not found.is_open or state.owner_epoch is None:
            return []
        if found.may_go_on and not found.is_waited_for(clock_ms):
            return []
        found.claim_clock = clock_ms
        claim = Claim(state.owner_epoch, self._owner.slot, self._owner.epoch, request.request_id)
        return [Announce(claim, found.reply_partition)]

    def oldest(self, partition: int) -> int | None:
        """Where the first request begins, in a reply partition, that is open or has ended a moment ago."""
        offsets = [
            found.first_offset
            for found in self
            if found.reply_partition == partition
            and (found.is_open or self.fed_clock - found.seen_clock < SETTLED_MS)
        ]
        return min(offsets, default=None)

    def forget(self, clock_ms: int) -> None:
        """Drops what needs nobody, a minute after its last record: late ones must not look like a request.

        An attempt that ended early and whose owner says no Retry was the last.
        """
        for request_id, found in list(self.found.items()):
            if found.state.end is not None and clock_ms - found.seen_clock >= RETRY_WAIT_MS:
                found.given_up = True
            if not found.is_open and clock_ms - found.seen_clock >= FORGET_MS:
                del self.found[request_id]

    @property
    def any_open(self) -> bool:
        return any(found.is_open for found in self)

    def _find(self, request_id: bytes, partition: int, offset: int, clock_ms: int) -> Found:
        found = self.found.get(request_id)
        if found is None:
            found = Found(StreamState(request_id), partition, offset, clock_ms)
            self.found[request_id] = found
        found.seen_clock = self.fed_clock = clock_ms
        return found

    def _note(self, found: Found, effect: Effect, timestamp_ms: int) -> None:
        if effect is Effect.ENDED:
            found.ended_at = timestamp_ms
        if effect is Effect.CLAIMED:
            found.claim_clock = None

    def _owner_is_lost(self, found: Found, lost: IsLost) -> bool:
        state = found.state
        if state.owner_epoch is None:
            return False
        slot = self.slot if state.owner_slot is None else state.owner_slot
        return state.owner_epoch == self._owner.epoch or lost(slot, state.owner_epoch)


def _stops(owned: OwnedRequest) -> list[Action]:
    """Runs that go on for nobody, of a request that is over."""
    end, attempt = owned.state.end, owned.state.attempt
    if isinstance(end, Failed):
        return [owned.cancellation(end.code)]
    return [owned.stray_cancellation(run, attempt) for run in sorted(owned.state.strays)]
