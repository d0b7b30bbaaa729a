"""The handoff's two sides, message by message."""

from pathlib import Path
from random import Random

import pytest

import workers.handoff
from schemas.codec import decode, encode
from schemas.kv_layout import KVLayout
from schemas.records import ContentCheck, Dispatch, Handoff, Offer, Pairing, PoolRank, Reserved, TransferEnded
from schemas.stream_state import Run
from tests.handoff_lives import LAYOUT
from tests.handoff_world import World
from tests.unit.test_handoff_records import REQUEST
from workers.handoff.content import checksum
from workers.handoff.decode_side import DecodeSide
from workers.handoff.effects import (
    Adopt,
    Effect,
    FreeBlocks,
    Recompute,
    Reserve,
    RetryElsewhere,
    Send,
    StartWrites,
    StopPrefill,
    StopWrites,
    Verify,
)
from workers.handoff.prefill_side import PrefillSide, Written
from workers.handoff.states import DECODE, PREFILL, State, render

T = b"t" * 16
DISPATCH = Dispatch(0, 11, 8, REQUEST, Pairing(T, 1, 22, 100, 1000))
RANKS = [PoolRank("host:1", 4096, 8192, 10)]
CHECKS = [ContentCheck(0, False, 0, 0, 1, b"digest")]


class Pair:
    """Both sides, and what they want done, in order. `now` stands still unless a test moves it."""

    def __init__(self, decode_layout: KVLayout = LAYOUT, recompute_by: float = 10.0) -> None:
        self.prefill = PrefillSide(Run(0, 11), LAYOUT)
        self.decode = DecodeSide(Run(1, 22), decode_layout, RANKS, landing_s=2.0, ask_again_s=0.2)
        self.recompute_by = recompute_by
        self.now = 0.0
        self.done: list[Effect] = []
        self.handle(self.prefill.offer(DISPATCH, self.now))

    def handle(self, effects: list[Effect]) -> None:
        """Sends at once, through the codec; keeps the rest."""
        for effect in effects:
            if not isinstance(effect, Send):
                self.done.append(effect)
                continue
            record = decode(encode(effect.record))
            if isinstance(record, Offer):
                assert effect.slot == 1
                self.handle(self.decode.on_offer(record, self.recompute_by, self.now))
            elif isinstance(record, Handoff):
                self.handle(self.decode.on_handoff(record, self.now))
            elif isinstance(record, Reserved):
                assert effect.slot == 0
                self.handle(self.prefill.on_reserved(record, self.now))
            elif effect.slot == 0:
                self.handle(self.prefill.on_ended(record, self.now))
            else:
                self.handle(self.decode.on_ended(record, self.now))

    def to(self, state: State) -> None:
        """As far as decode is in `state`, and prefill where it is then."""
        if state is State.OFFERED:
            return
        self.handle(self.decode.on_room(T, [7], 0, self.now))
        if state is State.RESERVED:
            return
        self.handle(self.prefill.on_computed(T, self.now))
        if state is State.TRANSFERRING:
            return
        self.handle(self.prefill.on_written(T, Written([3], 99, CHECKS, num_cached_tokens=2), self.now))
        if state is State.RECEIVED:
            return
        self.handle(self.decode.on_verified(T, "", self.now))

    def frees_at(self) -> float:
        """When decode gives the blocks back, where its clock is looked at as it asks for."""
        while (due := self.decode.next_due()) is not None:
            if FreeBlocks(T) in self.decode.tick(due):
                return due
        raise AssertionError("never")

    def kinds(self) -> list[type]:
        return [type(effect) for effect in self.done]


def test_a_transfer_that_nothing_disturbs() -> None:
    pair = Pair()
    pair.to(State.ADOPTED)
    assert pair.kinds() == [Reserve, StartWrites, Verify, Adopt, FreeBlocks]
    adopt = pair.done[3]
    assert isinstance(adopt, Adopt)
    assert adopt.offer.request == REQUEST
    handoff = adopt.handoff
    assert (handoff.first_token_id, handoff.num_tokens, handoff.num_cached_tokens) == (99, 3, 2)
    assert (handoff.block_ids, handoff.content_checks, handoff.lease_ms) == ([3], CHECKS, 1000)
    assert pair.prefill.num_live == pair.decode.num_live == 0


def test_prefill_that_is_computed_before_decode_has_room_writes_at_once_then() -> None:
    pair = Pair()
    pair.handle(pair.prefill.on_computed(T, 0.0))
    pair.to(State.RESERVED)
    assert pair.kinds() == [Reserve, StartWrites]


@pytest.mark.parametrize("state", [State.OFFERED, State.RESERVED, State.TRANSFERRING, State.RECEIVED])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_cancel_in_each_state_frees_the_blocks_of_both_sides(state: State, first: str) -> None:
    pair = Pair()
    pair.to(state)
    sides: list[PrefillSide | DecodeSide] = [pair.prefill, pair.decode]
    for side in sides if first == "prefill" else reversed(sides):
        pair.handle(side.cancel(T, "cancelled", 0.0))
    if state is State.TRANSFERRING:
        assert StopWrites in pair.kinds()
        assert FreeBlocks not in pair.kinds(), "a call may still run"
        pair.handle(pair.prefill.on_closed(T, 0.0))
    assert pair.kinds().count(FreeBlocks) == 2
    assert pair.kinds().count(StopPrefill) == (state is not State.RECEIVED)
    # Where prefill hears it first, decode may begin to compute it: its engine has the same cancellation.
    assert pair.kinds().count(Recompute) == (first == "prefill" and state is not State.RECEIVED)
    assert not {Adopt, RetryElsewhere} & set(pair.kinds())
    assert pair.prefill.num_live == pair.decode.num_live == 0


@pytest.mark.parametrize(("recompute_by", "expected"), [(10.0, Recompute), (-1.0, RetryElsewhere)])
def test_a_failure_is_computed_by_decode_unless_that_is_too_late(recompute_by: float, expected: type) -> None:
    pair = Pair(recompute_by=recompute_by)
    pair.to(State.TRANSFERRING)
    pair.handle(pair.prefill.on_failed(T, "transport", 0.0))
    assert pair.kinds() == [Reserve, StartWrites, StopPrefill, StopWrites, expected]
    assert pair.decode.num_fenced == 1
    assert pair.prefill.writes_open_since() == 0.0
    pair.handle(pair.prefill.on_closed(T, 0.1))
    assert pair.kinds()[-2:] == [FreeBlocks, FreeBlocks]
    assert pair.prefill.writes_open_since() is None


def test_decode_without_room_computes_it_at_the_reserve_deadline() -> None:
    pair = Pair()
    assert pair.decode.next_due() == 0.1
    pair.handle(pair.decode.tick(0.1))
    assert pair.kinds()[:3] == [Reserve, FreeBlocks, Recompute]
    assert pair.kinds().count(FreeBlocks) == 2
    assert pair.prefill.num_live == 0


def test_a_dead_prefill_s_blocks_wait_until_what_it_sent_has_landed() -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    pair.handle(pair.decode.on_gone(Run(0, 11), 0.5))
    assert pair.kinds()[-1] is Recompute
    assert pair.decode.num_fenced_blocks() == 1
    assert pair.frees_at() == pytest.approx(2.5)
    assert pair.decode.num_live == pair.decode.num_fenced_blocks() == 0


def test_what_a_failed_call_had_sent_may_still_land() -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    pair.handle(pair.prefill.on_failed(T, "transport", 0.0))
    pair.now = 0.5
    pair.handle(pair.prefill.on_closed(T, 0.5, may_land=True))
    assert pair.kinds()[-2:] == [Recompute, FreeBlocks], "prefill's own"
    assert pair.frees_at() == pytest.approx(2.5)


def test_what_was_sent_does_not_land_in_a_process_that_stands_still() -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    pair.handle(pair.decode.on_gone(Run(0, 11), 0.0))
    # It is stopped a moment later, and goes on when its time would be over: what its sockets hold comes now.
    for at in (0.1, 0.2, 100.0):
        assert pair.decode.tick(at) == []
    assert pair.frees_at() == pytest.approx(101.6)


def test_a_run_that_is_only_silent_keeps_its_blocks_from_others_until_it_says_a_word() -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    pair.handle(pair.decode.on_failed(T, "silent", 0.5))
    asks = []
    while (due := pair.decode.next_due()) is not None and due < 3600.0:
        effects = pair.decode.tick(due)
        assert FreeBlocks(T) not in effects
        asks.append(due)
    assert pair.decode.num_fenced_blocks(0.4) == 0
    assert pair.decode.num_fenced_blocks(0.5) == 1
    assert asks[0] == pytest.approx(0.7)
    assert len(asks) < 3600 / 4  # it is asked seldom in the end
    # It goes on: it ends the call that it stood in, and finds its lease over.
    pair.now = 3600.0
    pair.handle(pair.prefill.tick(pair.now))
    pair.handle(pair.prefill.on_closed(T, pair.now))
    assert FreeBlocks(T) in pair.done
    assert pair.decode.num_live == 0


def test_an_offer_that_comes_after_its_sender_s_end_is_computed() -> None:
    side = DecodeSide(Run(1, 22), LAYOUT, RANKS)
    side.on_gone(Run(0, 11), 0.0)
    offer = PrefillSide(Run(0, 11), LAYOUT).offer(DISPATCH, 0.0)[0]
    assert isinstance(offer, Send)
    assert isinstance(offer.record, Offer)
    assert [type(e) for e in side.on_offer(offer.record, 10.0, 1.0)] == [Recompute, Send]


def test_what_was_verified_outlives_prefill() -> None:
    pair = Pair()
    pair.to(State.RECEIVED)
    pair.handle(pair.decode.on_gone(Run(0, 11), 0.0))
    pair.handle(pair.decode.on_verified(T, "", 0.0))
    assert pair.kinds()[-2:] == [Adopt, FreeBlocks]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("request_id", b"x" * 16, "another_request"),
        ("attempt", 2, "another_request"),
        ("num_tokens", 2, "token_count"),
        ("layout", None, "layout"),
        ("checksum", b"", "checksum"),
        ("content_checks", [], "unchecked_blocks"),
    ],
)
def test_a_handoff_that_does_not_fit_is_not_believed(field: str, value: object, reason: str) -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    handoff = Handoff(
        REQUEST.request_id,
        1,
        0,
        11,
        1,
        22,
        1000,
        [3],
        3,
        99,
        checksum("m", LAYOUT, [1, 2, 3]),
        T,
        LAYOUT,
        content_checks=CHECKS,
    )
    setattr(handoff, field, value)
    pair.handle(pair.decode.on_handoff(handoff, 0.0))
    recompute = [e for e in pair.done if isinstance(e, Recompute)]
    assert [e.reason for e in recompute] == [reason]
    assert FreeBlocks in pair.kinds()
    assert Verify not in pair.kinds()


def test_layouts_that_do_not_fit_are_refused_by_name() -> None:
    pair = Pair(decode_layout=KVLayout(4, "bfloat16", 1, 1, 1, 4))
    assert [type(e) for e in pair.done] == [Recompute, StopPrefill, FreeBlocks]
    recompute = pair.done[0]
    assert isinstance(recompute, Recompute)
    assert recompute.reason == "layout: dtype float32 cannot become bfloat16"


@pytest.mark.parametrize("blocks", [[], [7, 8], [10], [-1]])
def test_prefill_writes_to_no_blocks_that_do_not_fit(blocks: list[int]) -> None:
    pair = Pair()
    pair.handle(pair.decode.on_room(T, blocks, 0, 0.0))
    pair.handle(pair.prefill.on_computed(T, 0.0))
    assert StartWrites not in pair.kinds()
    assert Recompute in pair.kinds()


def test_messages_of_other_runs_are_dropped() -> None:
    pair = Pair()
    pair.to(State.TRANSFERRING)
    done = len(pair.done)
    ended = TransferEnded(T, REQUEST.request_id, 1, 0, 10, 1, 22, "aborted", True, False)
    pair.handle(pair.decode.on_ended(ended, 0.0))
    ended = TransferEnded(T, REQUEST.request_id, 1, 0, 11, 1, 21, "aborted", True, False)
    pair.handle(pair.decode.on_ended(ended, 0.0))
    ended = TransferEnded(T, REQUEST.request_id, 1, 1, 21, 0, 11, "aborted", False, False)
    pair.handle(pair.prefill.on_ended(ended, 0.0))
    assert len(pair.done) == done


def test_prefill_says_of_what_it_does_not_know_that_nothing_is_written() -> None:
    side = PrefillSide(Run(0, 11), LAYOUT)
    reserved = Reserved(T, REQUEST.request_id, 1, 0, 11, 1, 22, 0, [7], LAYOUT, RANKS)
    [send] = side.on_reserved(reserved, 0.0)
    assert isinstance(send, Send)
    assert send.record == TransferEnded(
        T, REQUEST.request_id, 1, 0, 11, 1, 22, "aborted", True, True, "unknown"
    )


def test_without_faults_every_request_is_adopted() -> None:
    world = World(Random(1), sound=True)
    for _ in range(200):
        world.dispatch()
        for _ in range(4):
            for event in (world.deliver, world.compute, world.begin_call, world.land, world.end_call):
                event()
            world.hear_writer()
            world.engine_step()
            world.verify()
            world.finish_running()
    assert world.num_requests > 50
    assert len(world.decode.served) > 50
    assert set(world.decode.served.values()) == {"Adopt"}


def test_the_page_holds_the_tables() -> None:
    page = (Path(workers.handoff.__file__).parent / "PROTOCOL.md").read_text()
    assert f"### Prefill\n\n{render(PREFILL)}\n\n### Decode\n\n{render(DECODE)}\n" in page
