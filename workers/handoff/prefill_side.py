"""Prefill's side of all its transfers: messages, the transport's words and time in, effects out. Pure.

NOTE: `writes_closed` is the word that decode gives its blocks back on. It is said only for a transfer that
has not begun to write, whose last call has returned (`on_written`, `on_closed`), or that this run never knew.
"""

from dataclasses import dataclass, field
from typing import ClassVar, assert_never

from schemas.kv_layout import KVLayout
from schemas.priority import PriorityClass
from schemas.records import ContentCheck, Dispatch, Handoff, Offer, Reserved, TransferEnded
from schemas.sampling import TokenLogprobs
from schemas.stream_state import Run
from workers.handoff.content import checksum
from workers.handoff.effects import Effect, FreeBlocks, Send, StartWrites, StopPrefill, StopWrites
from workers.handoff.ended_messages import ended, unknown
from workers.handoff.layout import refusal
from workers.handoff.side import Side
from workers.handoff.states import PREFILL, Action, Event, State
from workers.handoff.transfer import Ended, Over, Transfer


@dataclass(frozen=True, slots=True)
class Written:
    """What prefill knows when all is computed, written and acknowledged by the transport.

    `block_ids` are prefill's, in order; `num_cached_tokens` were found in its prefix cache. `canary`: as in
    Handoff.
    """

    block_ids: list[int]
    first_token_id: int
    content_checks: list[ContentCheck]
    num_cached_tokens: int = 0
    first_token_logprobs: TokenLogprobs | None = None
    canary: int = -1


@dataclass(slots=True)
class _Outgoing:
    transfer: Transfer
    dispatch: Dispatch
    lease_ms: int
    reserved: Reserved | None = None
    written: Written | None = None
    is_computed: bool = False
    writes_closed: bool = True
    may_land: bool = False


@dataclass(slots=True)
class PrefillSide(Side[_Outgoing]):
    """The transfers that a run offers. `remember_s` is longer than any message may be late.

    Not thread-safe.
    """

    peer_gone: ClassVar[str] = "decode_gone"

    run: Run
    layout: KVLayout
    remember_s: float = 600.0
    _live: dict[bytes, _Outgoing] = field(default_factory=dict)
    _over: Over = field(default_factory=Over)
    _ended: Ended = field(init=False)

    def __post_init__(self) -> None:
        self._ended = Ended(self.remember_s)

    def offer(self, dispatch: Dispatch, now: float) -> list[Effect]:
        """A dispatch with a pairing came: offers it, before anything is computed. A second time: nothing."""
        pairing, request = dispatch.pairing, dispatch.request
        if pairing is None:
            raise ValueError("a dispatch without a pairing is served here, not offered")
        if pairing.transfer_id in self._live or pairing.transfer_id in self._ended:
            return []
        transfer = Transfer(
            pairing.transfer_id,
            request.request_id,
            request.attempt,
            PriorityClass(request.priority),
            Run(pairing.decode_slot, pairing.decode_epoch),
            reserve_deadline=now + pairing.reserve_ms / 1000,
            deadline=now + pairing.lease_ms / 1000,
        )
        outgoing = self._live[pairing.transfer_id] = _Outgoing(transfer, dispatch, pairing.lease_ms)
        if transfer.peer in self._over:
            return self._handle(outgoing, Event.PEER_GONE, now, self.peer_gone)
        offer = Offer(
            pairing.transfer_id,
            self.run.slot,
            self.run.epoch,
            pairing.decode_slot,
            pairing.decode_epoch,
            pairing.reserve_ms,
            pairing.lease_ms,
            dispatch.expected_output_tokens,
            self.layout,
            request,
        )
        return [Send(pairing.decode_slot, transfer.priority, offer)]

    def on_reserved(self, reserved: Reserved, now: float) -> list[Effect]:
        """Blocks at decode. What this run does not know it does not write to, and says so."""
        if Run(reserved.prefill_slot, reserved.prefill_epoch) != self.run:
            return []
        outgoing = self._live.get(reserved.transfer_id)
        sender = Run(reserved.decode_slot, reserved.decode_epoch)
        if outgoing is None:
            return [unknown(reserved, self.run, sender)]
        if sender != outgoing.transfer.peer:
            return []
        if outgoing.transfer.state is not State.OFFERED:
            return self._handle(outgoing, Event.RESERVED, now)
        unfit = refusal(self.layout, reserved.layout) or _unfit_blocks(outgoing.dispatch, reserved)
        if unfit:
            return self._handle(outgoing, Event.FAILED, now, unfit)
        outgoing.reserved = reserved
        effects = self._handle(outgoing, Event.RESERVED, now)
        if outgoing.is_computed:
            effects += self._handle(outgoing, Event.WRITABLE, now)
        return effects

    def on_ended(self, told: TransferEnded, now: float) -> list[Effect]:
        """Decode adopted it, gave it up, or asks whether the writes are closed."""
        if Run(told.to_slot, told.to_epoch) != self.run:
            return []
        outgoing = self._live.get(told.transfer_id)
        sender = Run(told.from_slot, told.from_epoch)
        if outgoing is None:
            answer = unknown(told, self.run, sender)
            return [] if told.state == State.ADOPTED else [answer]
        if sender != outgoing.transfer.peer:
            return []
        event = Event.PEER_ADOPTED if told.state == State.ADOPTED else Event.PEER_ENDED
        return self._handle(outgoing, event, now, told.reason)

    def on_computed(self, transfer_id: bytes, now: float) -> list[Effect]:
        """The first KV of it is computed."""
        outgoing = self._live.get(transfer_id)
        if outgoing is None:
            return []
        outgoing.is_computed = True
        return self._handle(outgoing, Event.WRITABLE, now)

    def on_written(self, transfer_id: bytes, written: Written, now: float) -> list[Effect]:
        """All is computed, and all calls that wrote it have returned well."""
        outgoing = self._live.get(transfer_id)
        if outgoing is None:
            return []
        if outgoing.transfer.is_over:  # it crossed StopWrites, which the writer then does not answer
            return self.on_closed(transfer_id, now)
        if outgoing.transfer.state is State.TRANSFERRING:
            outgoing.written, outgoing.writes_closed = written, True
        return self._handle(outgoing, Event.WRITTEN, now)

    def on_closed(self, transfer_id: bytes, now: float, *, may_land: bool = False) -> list[Effect]:
        """The answer to StopWrites: no call runs, and nothing reads the blocks.

        `may_land`: one has failed, and what it had sent may not have landed yet.
        """
        outgoing = self._live.get(transfer_id)
        if outgoing is None:
            return []
        if outgoing.transfer.is_over:
            outgoing.writes_closed, outgoing.may_land = True, outgoing.may_land or may_land
        return self._handle(outgoing, Event.CLOSED, now)

    def tick(self, now: float) -> list[Effect]:
        """What the clock makes due."""
        effects: list[Effect] = []
        for outgoing in list(self._live.values()):
            if event := outgoing.transfer.due(now):
                reason = "not_reserved" if event is Event.RESERVE_DEADLINE else "deadline"
                effects += self._handle(outgoing, event, now, reason)
        self._ended.forget(now)
        return effects

    def next_due(self) -> float | None:
        """When `tick` has something to do next."""
        times = [o.transfer.next_due() for o in self._live.values()]
        return min((t for t in times if t is not None), default=None)

    def writes_open_since(self) -> float | None:
        """When the first of the transfers ended whose writes are not closed yet. A worker in which that is
        long ago must end: decode's blocks wait for this word, or for the end of the run."""
        ends = [o.transfer.ended_at for o in self._live.values() if not o.writes_closed]
        return min((at for at in ends if at is not None), default=None)

    def _handle(self, outgoing: _Outgoing, event: Event, now: float, reason: str = "") -> list[Effect]:
        transfer = outgoing.transfer
        effects: list[Effect] = []
        for action in transfer.move(PREFILL, event, now, reason):
            effects += self._act(outgoing, action)
        if transfer.can_be_forgotten:
            self._live.pop(transfer.transfer_id, None)
            self._ended.note(transfer.transfer_id, now)
        return effects

    def _act(self, outgoing: _Outgoing, action: Action) -> list[Effect]:
        transfer = outgoing.transfer
        match action:
            case Action.START_WRITES:
                assert outgoing.reserved is not None
                outgoing.writes_closed = False
                return [StartWrites(outgoing.reserved)]
            case Action.STOP_WRITES:
                return [StopWrites(transfer.transfer_id)]
            case Action.STOP_PREFILL:
                return [StopPrefill(transfer.transfer_id, transfer.reason)]
            case Action.FREE:
                held, transfer.holds = transfer.holds, False
                return [FreeBlocks(transfer.transfer_id)] if held else []
            case Action.SEND_HANDOFF:
                return [Send(transfer.peer.slot, transfer.priority, self._handoff(outgoing))]
            case Action.SEND_ENDED:
                closed, may_land = outgoing.writes_closed, outgoing.may_land
                return [ended(transfer, self.run, writes_closed=closed, may_land=may_land)]
            case (
                Action.SEND_RESERVED | Action.VERIFY | Action.ADOPT | Action.FALL_BACK | Action.AWAIT_LANDING
            ):
                raise AssertionError(f"{action} is not prefill's")
        assert_never(action)

    def _handoff(self, outgoing: _Outgoing) -> Handoff:
        transfer, written, reserved = outgoing.transfer, outgoing.written, outgoing.reserved
        assert written is not None
        assert reserved is not None
        request = outgoing.dispatch.request
        token_ids = request.prompt_token_ids + request.output_token_ids
        return Handoff(
            transfer.request_id,
            transfer.attempt,
            self.run.slot,
            self.run.epoch,
            transfer.peer.slot,
            transfer.peer.epoch,
            outgoing.lease_ms,
            written.block_ids,
            len(token_ids),
            written.first_token_id,
            checksum(request.model, reserved.layout, token_ids),
            transfer.transfer_id,
            reserved.layout,
            written.first_token_logprobs,
            written.num_cached_tokens,
            written.content_checks,
            written.canary,
        )


def _unfit_blocks(dispatch: Dispatch, reserved: Reserved) -> str:
    """What is wrong with the blocks that decode names, or nothing."""
    block_size = reserved.layout.block_size
    num_tokens = len(dispatch.request.prompt_token_ids) + len(dispatch.request.output_token_ids)
    missing = num_tokens - reserved.num_cached_tokens
    if reserved.num_cached_tokens % block_size or missing < 1:
        return f"{reserved.num_cached_tokens} cached tokens of {num_tokens}"
    if len(reserved.block_ids) != -(-missing // block_size):
        return f"{len(reserved.block_ids)} blocks for {missing} tokens"
    if len(reserved.ranks) != reserved.layout.tp_degree:
        return f"{len(reserved.ranks)} ranks of {reserved.layout.tp_degree}"
    num_blocks = min(rank.num_blocks for rank in reserved.ranks)
    if not all(0 <= block < num_blocks for block in reserved.block_ids):
        return "a block outside of decode's pool"
    return ""
