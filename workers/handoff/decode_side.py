"""Decode's side of all its transfers: messages, the engine's words and time in, effects out. Pure.

NOTE: blocks that prefill was told of are given back only when no write may land in them any more.
"""

from dataclasses import dataclass, field
from typing import ClassVar, assert_never

from schemas.kv_layout import KVLayout
from schemas.priority import PriorityClass
from schemas.records import Handoff, Offer, PoolRank, Reserved, TransferEnded
from schemas.stream_state import Run
from workers.handoff.content import checksum
from workers.handoff.effects import (
    Adopt,
    Effect,
    FreeBlocks,
    Recompute,
    Reserve,
    RetryElsewhere,
    Send,
    Verify,
)
from workers.handoff.ended_messages import ended
from workers.handoff.landing import Landing
from workers.handoff.layout import refusal
from workers.handoff.side import Side
from workers.handoff.states import DECODE, Action, Event, State
from workers.handoff.transfer import Ended, Over, Transfer


@dataclass(slots=True)
class _Incoming:
    """`recompute_by`: later than this the request would miss its deadline here."""

    transfer: Transfer
    offer: Offer
    recompute_by: float
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    handoff: Handoff | None = None
    landing: Landing | None = None
    ask_at: float | None = None
    ask_s: float = 0.0


@dataclass(slots=True)
class DecodeSide(Side[_Incoming]):
    """The transfers that a run is offered. Not thread-safe.

    `ranks` says where its pools are. `landing_s` is how long what was sent may take to land after a failure,
    or its sender's end, while this process runs. `ask_again_s`: after which prefill is asked whether its
    writes are closed; each time after twice as long, up to `ask_again_at_most_s`. `remember_s` is longer than
    any message may be late.
    """

    peer_gone: ClassVar[str] = "prefill_gone"

    run: Run
    layout: KVLayout
    ranks: list[PoolRank]
    landing_s: float = 2.0
    ask_again_s: float = 0.2
    ask_again_at_most_s: float = 5.0
    remember_s: float = 600.0
    _live: dict[bytes, _Incoming] = field(default_factory=dict)
    _over: Over = field(default_factory=Over)
    _ended: Ended = field(init=False)

    def __post_init__(self) -> None:
        self._ended = Ended(self.remember_s)

    @property
    def num_fenced(self) -> int:
        """Transfers that are over, and whose blocks a write may still land in."""
        return sum(i.transfer.is_over for i in self._live.values())

    def num_fenced_blocks(self, since: float = float("inf")) -> int:
        """What these keep from others, of transfers that were over by `since`."""
        ended = ((i.transfer.ended_at, len(i.block_ids)) for i in self._live.values())
        return sum(num_blocks for at, num_blocks in ended if at is not None and at <= since)

    def on_offer(self, offer: Offer, recompute_by: float, now: float) -> list[Effect]:
        """A request with a promise of its KV. A second time: nothing."""
        if Run(offer.decode_slot, offer.decode_epoch) != self.run:
            return []
        if offer.transfer_id in self._live or offer.transfer_id in self._ended:
            return []
        request = offer.request
        transfer = Transfer(
            offer.transfer_id,
            request.request_id,
            request.attempt,
            PriorityClass(request.priority),
            Run(offer.prefill_slot, offer.prefill_epoch),
            reserve_deadline=now + offer.reserve_ms / 1000,
            deadline=now + offer.lease_ms / 1000,
        )
        incoming = self._live[offer.transfer_id] = _Incoming(transfer, offer, recompute_by)
        if unfit := refusal(offer.layout, self.layout):
            transfer.holds = False
            return self._handle(incoming, Event.FAILED, now, unfit)
        if transfer.peer in self._over:
            transfer.holds = False
            return self._handle(incoming, Event.PEER_GONE, now, self.peer_gone)
        return [Reserve(offer)]

    def on_room(
        self, transfer_id: bytes, block_ids: list[int], num_cached_tokens: int, now: float
    ) -> list[Effect]:
        """The answer to Reserve. `block_ids` are for the tokens behind the cached ones."""
        incoming = self._live.get(transfer_id)
        if incoming is None:
            return []
        if incoming.transfer.state is State.OFFERED:
            incoming.block_ids, incoming.num_cached_tokens = block_ids, num_cached_tokens
        return self._handle(incoming, Event.ROOM, now)

    def on_handoff(self, handoff: Handoff, now: float) -> list[Effect]:
        """All was written, prefill says. What does not fit what was offered and reserved is not believed."""
        if Run(handoff.decode_slot, handoff.decode_epoch) != self.run:
            return []
        incoming = self._live.get(handoff.transfer_id)
        sender = Run(handoff.prefill_slot, handoff.prefill_epoch)
        if incoming is None or sender != incoming.transfer.peer:
            return []
        effects: list[Effect] = []
        if incoming.transfer.state is State.RESERVED:
            if doubt := self._doubt(incoming, handoff):
                effects = self._handle(incoming, Event.FAILED, now, doubt)
            else:
                incoming.handoff = handoff
        return effects + self._handle(incoming, Event.HANDED_OFF, now, "unexpected_handoff")

    def on_verified(self, transfer_id: bytes, error: str, now: float) -> list[Effect]:
        """The answer to Verify: what is wrong with the bytes, or nothing."""
        if error:
            return self.on_failed(transfer_id, error, now)
        effects = self._named(transfer_id, Event.CONTENT_OK, now)
        return effects + self._named(transfer_id, Event.ADOPTED, now) if effects else effects

    def on_ended(self, told: TransferEnded, now: float) -> list[Effect]:
        """Prefill gave it up, or answers that its writes are closed."""
        if Run(told.to_slot, told.to_epoch) != self.run:
            return []
        incoming = self._live.get(told.transfer_id)
        if incoming is None or Run(told.from_slot, told.from_epoch) != incoming.transfer.peer:
            return []
        event = Event.PEER_ENDED
        if told.writes_closed:
            event = Event.PEER_BROKE_OFF if told.may_land else Event.PEER_CLOSED
        return self._handle(incoming, event, now, told.reason)

    def tick(self, now: float) -> list[Effect]:
        """What the clock makes due."""
        effects: list[Effect] = []
        for incoming in list(self._live.values()):
            if event := incoming.transfer.due(now):
                reason = "no_blocks" if event is Event.RESERVE_DEADLINE else "deadline"
                effects += self._handle(incoming, event, now, reason)
            elif incoming.landing is not None:
                if incoming.landing.is_over(now):
                    effects += self._handle(incoming, Event.LANDED, now)
            elif incoming.ask_at is not None and now >= incoming.ask_at:
                incoming.ask_s = min(2 * incoming.ask_s, self.ask_again_at_most_s)
                incoming.ask_at = now + incoming.ask_s
                effects += self._handle(incoming, Event.ASK_AGAIN, now)
        self._ended.forget(now)
        return effects

    def next_due(self) -> float | None:
        """When `tick` has something to do next."""
        times: list[float | None] = []
        for incoming in self._live.values():
            landing = incoming.landing
            waits = incoming.ask_at if landing is None else landing.next_look
            times.append(waits if incoming.transfer.is_over else incoming.transfer.next_due())
        return min((t for t in times if t is not None), default=None)

    def _doubt(self, incoming: _Incoming, handoff: Handoff) -> str:
        request = incoming.offer.request
        token_ids = request.prompt_token_ids + request.output_token_ids
        if (handoff.request_id, handoff.attempt) != (request.request_id, request.attempt):
            return "another_request"
        if handoff.num_tokens != len(token_ids):
            return "token_count"
        if handoff.layout != self.layout:
            return "layout"
        if handoff.checksum != checksum(request.model, self.layout, token_ids):
            return "checksum"
        checked = {check.block for check in handoff.content_checks}
        if checked != set(range(len(incoming.block_ids))):
            return "unchecked_blocks"
        return ""

    def _handle(self, incoming: _Incoming, event: Event, now: float, reason: str = "") -> list[Effect]:
        transfer = incoming.transfer
        effects: list[Effect] = []
        for action in transfer.move(DECODE, event, now, reason):
            effects += self._act(incoming, action, now)
        if transfer.can_be_forgotten:
            self._live.pop(transfer.transfer_id, None)
            self._ended.note(transfer.transfer_id, now)
        elif transfer.is_over and incoming.ask_at is None:
            incoming.ask_s = self.ask_again_s
            incoming.ask_at = now + incoming.ask_s
        return effects

    def _act(self, incoming: _Incoming, action: Action, now: float) -> list[Effect]:
        transfer, offer = incoming.transfer, incoming.offer
        match action:
            case Action.SEND_RESERVED:
                return [Send(transfer.peer.slot, transfer.priority, self._reserved(incoming))]
            case Action.VERIFY:
                assert incoming.handoff is not None
                return [Verify(incoming.handoff)]
            case Action.ADOPT:
                assert incoming.handoff is not None
                transfer.holds = False
                return [Adopt(offer, incoming.handoff)]
            case Action.FREE:
                held, transfer.holds = transfer.holds, False
                return [FreeBlocks(transfer.transfer_id)] if held else []
            case Action.FALL_BACK:
                fall_back = Recompute if now <= incoming.recompute_by else RetryElsewhere
                return [fall_back(offer, transfer.reason)]
            case Action.SEND_ENDED:
                return [ended(transfer, self.run)]
            case Action.AWAIT_LANDING:
                if incoming.landing is None:
                    incoming.landing = Landing(self.landing_s, now)
                return []
            case Action.SEND_HANDOFF | Action.START_WRITES | Action.STOP_WRITES | Action.STOP_PREFILL:
                raise AssertionError(f"{action} is not decode's")
        assert_never(action)

    def _reserved(self, incoming: _Incoming) -> Reserved:
        transfer = incoming.transfer
        return Reserved(
            transfer.transfer_id,
            transfer.request_id,
            transfer.attempt,
            transfer.peer.slot,
            transfer.peer.epoch,
            self.run.slot,
            self.run.epoch,
            incoming.num_cached_tokens,
            incoming.block_ids,
            self.layout,
            self.ranks,
        )
