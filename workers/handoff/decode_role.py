"""A decode worker's handoffs: it goes on from prompts that others computed, or computes them itself."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from schemas.clock import epoch_ms
from schemas.fleet import FleetEvent, FleetView
from schemas.handoff_records import Message, WorkerRole
from schemas.records import (
    Dispatch,
    Handoff,
    InferenceRequest,
    Left,
    Offer,
    PoolRank,
    TransferEnded,
    WorkerStatus,
)
from schemas.stream_state import Run
from workers.engine import EngineThread
from workers.handoff.decode_blocks import DecodeBlocks
from workers.handoff.decode_side import DecodeSide
from workers.handoff.effects import Adopt, Effect, FreeBlocks, Recompute, Reserve, RetryElsewhere, Verify
from workers.handoff.kv_access import KVAccess
from workers.handoff.kv_pool import compare
from workers.handoff.layout import Place
from workers.handoff.role import HandoffRole, Host
from workers.handoff.sender import HandoffSender
from workers.handoff.transfer import TOLD_S
from workers.handoff.vouching import Vouching
from workers.live_requests import End, LiveRequest
from workers.request import FinishReason, Request

log = logging.getLogger(__name__)

# A run that is silent may have been stopped in the midst of a write, and go on at any time: what it may write
# to waits until it does, or is said to have left. Its slot is given to another when it has ended, though
# maybe nobody has said so; this much longer is for one that was started beside it.
_MAY_WAKE_S = 30.0
# So much of the pool may wait for runs that nobody hears, for so long. A new life of this one has memory that
# none of them knows, and its own streams go on elsewhere.
_FENCED_SHARE = 0.5
_FENCED_S = 120.0


class FencedError(RuntimeError):
    """Too much of the pool is kept for writes of others that may never come."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """Until the engine has the request. `go` gives it to the engine, once it is prepared."""

    transfer_id: bytes
    live: LiveRequest
    peer: Run
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    is_prepared: bool = False
    go: Callable[[], None] | None = None


class DecodeRole(HandoffRole):
    role = WorkerRole.DECODE

    def __init__(
        self,
        run: Run,
        thread: EngineThread,
        kv: KVAccess,
        sender: HandoffSender,
        fleet: FleetView,
        host: Host,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool, shape = kv.pool, kv.pool.shape
        rank = PoolRank(kv.transport.segment, pool.keys_address, pool.values_address, shape.num_blocks)
        self._decode = DecodeSide(run, shape.layout, [rank])
        super().__init__(run, shape.layout, self._decode, sender, fleet, clock)
        self._thread = thread
        self._pool = pool
        self._host = host
        self._incoming: dict[bytes, _Incoming] = {}
        self._by_request: dict[Request, _Incoming] = {}
        self._told_until: dict[bytes, float] = {}
        self._may_wake_until: dict[Run, float] = {}
        self._vouching = Vouching()
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="kv-verifier")
        self._blocks = DecodeBlocks(
            thread.engine,
            partial(self._call_soon, self._on_room),
            partial(self._call_soon, self._fail),
            partial(self._call_soon, self._on_doubted),
        )
        thread.engine.watcher = self._blocks

    @property
    def num_fenced_blocks(self) -> int:
        return self._decode.num_fenced_blocks()

    def tell(self, status: WorkerStatus) -> None:
        super().tell(status)
        now = self._clock()
        self._told_until = {i: until for i, until in self._told_until.items() if until > now}
        kept = [each.live.request.request_id for each in self._incoming.values() if each.block_ids]
        status.num_running += len(kept)
        status.handoffs = [*kept, *(i for i in self._told_until if i not in kept)]

    def on_prepared(self, request: Request) -> bool:
        incoming = self._by_request.get(request)
        if incoming is None:
            return False
        incoming.is_prepared = True
        self._go_if_ready(incoming)
        return True

    def on_unprepared(self, request: Request, end: End) -> bool:
        if (incoming := self._by_request.get(request)) is not None:
            self._drop(incoming, "unprepared")
        return False

    def on_whole(self, dispatch: Dispatch) -> None:
        for incoming in self._of(dispatch.request.request_id, dispatch.request.attempt):
            self._drop(incoming, "superseded")

    async def close(self) -> None:
        await super().close()
        self._verifier.shutdown(wait=False, cancel_futures=True)

    def on_fleet_event(self, event: FleetEvent, offset: int) -> None:
        super().on_fleet_event(event, offset)
        if isinstance(event, Left) and event.role == "worker":
            # Maybe an earlier life than the one that has the slot now.
            self._do(self._decode.on_gone(Run(event.slot, event.epoch), self._clock()))

    def on_fleet_change(self) -> None:
        super().on_fleet_change()
        for peer in self._vouching.peers():
            self._hear_canary(peer)

    def _hear_canary(self, peer: Run) -> None:
        if vouched := self._vouching.passed(peer, self._fleet.canary_passed(peer.slot, peer.epoch)):
            self._thread.call(partial(self._blocks.vouch, vouched))
        if self._fleet.computes_wrong(peer.slot, peer.epoch):
            if doubted := self._vouching.over(peer):
                log.warning("KV that was taken is in doubt", extra={"peer": peer, "transfers": len(doubted)})
                self.counts["doubted"] += len(doubted)
                self._thread.call(partial(self._blocks.doubt, doubted))
        elif self._gone(peer).startswith(("left", "superseded")) and (unheard := self._vouching.over(peer)):
            # What a run that died otherwise had given stays, as what it had told of its own does.
            self._thread.call(partial(self._blocks.vouch, unheard))

    def check(self, now: float) -> None:
        fenced, most = self._decode.num_fenced_blocks(now - _FENCED_S), self._pool.shape.num_blocks
        if fenced > _FENCED_SHARE * most:
            raise FencedError(
                f"{fenced} of {most} blocks wait for writes of workers that are not heard of: if those are "
                "gone for good, start their slots again"
            )

    def _cancel(self, request_id: bytes, attempt: int) -> None:
        for incoming in self._of(request_id, attempt):
            self._drop(incoming, "cancelled")
            self._host.end(incoming.live, End(FinishReason.CANCELLED))

    def _of(self, request_id: bytes, attempt: int) -> list[_Incoming]:
        found = []
        for incoming in self._incoming.values():
            request = incoming.live.request
            if request.request_id == request_id and request.attempt <= attempt:
                found.append(incoming)
        return found

    def _received(self, message: Message, traceparent: str | None) -> list[Effect]:
        now = self._clock()
        if isinstance(message, Offer):
            return self._on_offer(message, traceparent, now)
        if isinstance(message, Handoff):
            if self._fleet.computes_wrong(message.prefill_slot, message.prefill_epoch):
                return self._fail(message.transfer_id, "prefill_computes_wrong")
            return self._decode.on_handoff(message, now)
        if isinstance(message, TransferEnded):
            return self._decode.on_ended(message, now)
        log.warning("a message for prefill workers", extra={"kind": type(message).__name__})
        return []

    def _on_offer(self, offer: Offer, traceparent: str | None, now: float) -> list[Effect]:
        request, peer = offer.request, Run(offer.prefill_slot, offer.prefill_epoch)
        self._do(self._look_at(peer, now))
        effects = self._decode.on_offer(offer, self._recompute_by(request, now), now)
        if not effects:  # a double, or another run's
            return []
        dispatch = Dispatch(offer.decode_slot, offer.decode_epoch, offer.expected_output_tokens, request)
        taken = self._host.take(dispatch, traceparent)
        if taken is None or taken[1] is not None:
            if taken is not None and (end := taken[1]) is not None:
                self._host.end(taken[0], end)
            unwanted = self._decode.cancel(offer.transfer_id, "not_wanted", now)
            return [effect for effect in effects if not isinstance(effect, Reserve)] + unwanted
        live = taken[0]
        self.on_whole(dispatch)
        incoming = _Incoming(offer.transfer_id, live, peer)
        self._incoming[offer.transfer_id] = self._by_request[live.request] = incoming
        self._do(effects)
        self._host.prepare(live)
        return []

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reserve(offer):
                request = self._incoming[offer.transfer_id].live.request
                self._thread.call(partial(self._blocks.reserve, offer.transfer_id, request))
            case FreeBlocks(transfer_id):
                self._thread.call(partial(self._blocks.release, transfer_id))
            case Verify(handoff):
                self._verify(handoff)
            case Adopt(offer, handoff):
                peer = Run(handoff.prefill_slot, handoff.prefill_epoch)
                self._vouching.take(offer.transfer_id, peer, handoff.canary)
                adopt = partial(self._blocks.adopt, offer.transfer_id, handoff)
                self._ready(offer, lambda: self._thread.call(adopt), "adopted", "")
            case Recompute(offer, reason):
                if (incoming := self._incoming.get(offer.transfer_id)) is not None:
                    request = incoming.live.request
                    self._ready(offer, lambda: self._thread.add(request), "recomputed", reason)
            case RetryElsewhere(offer, reason):
                if (incoming := self._incoming.get(offer.transfer_id)) is not None:
                    self.counts["retried elsewhere"] += 1
                    self._forget(incoming)
                    # An end that its owner did not ask for: it tries again at once.
                    self._host.end(incoming.live, End(FinishReason.CANCELLED, reason))
            case _:
                raise AssertionError(f"{type(effect).__name__} is not decode's")

    def _ready(self, offer: Offer, go: Callable[[], None], outcome: str, reason: str) -> None:
        self.counts[outcome] += 1
        if reason:
            log.info("computing it here", extra={"transfer": offer.transfer_id.hex(), "reason": reason})
        incoming = self._incoming[offer.transfer_id]
        incoming.go = go
        self._go_if_ready(incoming)

    def _go_if_ready(self, incoming: _Incoming) -> None:
        if incoming.go is not None and incoming.is_prepared:
            self._forget(incoming)
            incoming.go()

    def _drop(self, incoming: _Incoming, reason: str) -> None:
        """Nobody wants it from here any more; its end is the caller's to tell."""
        self._forget(incoming)
        self._do(self._decode.cancel(incoming.transfer_id, reason, self._clock()))
        if self._decode.state(incoming.transfer_id) is None:  # adopted, but for its grammar
            self._thread.call(partial(self._blocks.release, incoming.transfer_id))

    def _forget(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.transfer_id]
        del self._by_request[incoming.live.request]
        self._told_until[incoming.live.request.request_id] = self._clock() + TOLD_S

    def _verify(self, handoff: Handoff) -> None:
        incoming = self._incoming[handoff.transfer_id]
        place = Place(self._pool.shape, incoming.block_ids, incoming.num_cached_tokens)
        checks = handoff.content_checks

        def verify() -> None:
            error = compare(self._pool, place, handoff.num_tokens, checks)
            self._call_soon(self._on_verified, handoff.transfer_id, error)

        self._verifier.submit(verify)

    def _on_room(self, transfer_id: bytes, block_ids: list[int], num_cached_tokens: int) -> list[Effect]:
        if (incoming := self._incoming.get(transfer_id)) is not None:
            incoming.block_ids, incoming.num_cached_tokens = block_ids, num_cached_tokens
        return self._decode.on_room(transfer_id, block_ids, num_cached_tokens, self._clock())

    def _on_doubted(self, request: Request) -> list[Effect]:
        self._host.disown(request)
        return []

    def _on_verified(self, transfer_id: bytes, error: str) -> list[Effect]:
        return self._decode.on_verified(transfer_id, error, self._clock())

    def _fail(self, transfer_id: bytes, reason: str) -> list[Effect]:
        return self._decode.on_failed(transfer_id, reason, self._clock())

    def _look_at(self, peer: Run, now: float) -> list[Effect]:
        gone = self._gone(peer)
        if gone.startswith("left"):
            self._may_wake_until.pop(peer, None)
            return self._decode.on_gone(peer, now)
        if not gone and not self._fleet.computes_wrong(peer.slot, peer.epoch):
            return []
        if gone.startswith("superseded") and now >= self._may_wake_until.setdefault(peer, now + _MAY_WAKE_S):
            del self._may_wake_until[peer]
            return self._decode.on_gone(peer, now)
        effects: list[Effect] = []
        for incoming in list(self._incoming.values()):
            if incoming.peer == peer:
                effects += self._fail(incoming.transfer_id, gone or "prefill_computes_wrong")
        return effects

    def _recompute_by(self, request: InferenceRequest, now: float) -> float:
        """Later than this another worker is asked: here it would miss the time it must start by, which it can
        still meet. Only once: that one may be late, too."""
        rate = self._thread.stats.prefill_tokens_per_s
        if request.start_ms is None or request.attempt > 1 or not rate:
            return float("inf")
        left_s = (request.accepted_at + request.start_ms - epoch_ms()) / 1000
        by = now + left_s - (len(request.prompt_token_ids) + len(request.output_token_ids)) / rate
        return by if by > now else float("inf")
