"""What is taken over from a lost owner, and what is not. Whole histories are in the properties."""

import pytest

from gateway.actions import Action, Announce, Bill, Cancel, Reply, SendRequest
from gateway.ended_requests import SETTLED_MS
from gateway.estate import FORGET_MS, Estate, Found
from gateway.owner import Owner
from gateway.replay import RETRY_WAIT_MS
from gateway.slot_watch import SlotWatch
from schemas.fleet import FleetView
from schemas.records import (
    Admitted,
    Attach,
    Cancellation,
    Claim,
    Completion,
    Dispatched,
    Failed,
    Heartbeat,
    Retry,
    Tokens,
)
from schemas.stream_state import LATE_ADMITTED_MS, ReplyRecord
from schemas.token_records import TokenChunk
from tests.gateway_factories import WORKER_EPOCH, inference_request

RID = bytes(range(16))
DEAD = (1, 70)
HEIR = (0, 90)
PARTITION = 3
CLOCK = 5_000
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Desk:
    """The heir of one request that was dispatched, with two tokens told; the dead owner is silent."""

    def __init__(self, detach_ms: int = 0) -> None:
        self.view = FleetView()
        self.owner = Owner(*HEIR, shards=4, cancel_timeout_ms=30_000)
        self.estate = Estate(DEAD[0], self.owner)
        self.request = inference_request(RID, owner_epoch=DEAD[1], detach_ms=detach_ms)
        self.offset = 40
        self.read(Dispatched(RID, 1, DEAD[1], 0, WORKER_EPOCH, "simulated", 2, 17))
        self.tokens(0, b"ab")

    def read(self, record: Tokens | ReplyRecord | Cancellation) -> list[Action]:
        self.offset += 1
        return self.estate.on_record(record, PARTITION, self.offset, 1_000, CLOCK)

    def tokens(self, position: int, ids: bytes, attempt: int = 1) -> list[Action]:
        return self.read(Tokens.of(0, WORKER_EPOCH, [TokenChunk(RID, attempt, position, list(ids))]))

    def due(self, *, everything: bool = True, lost: bool = True, clock: int = CLOCK) -> list[Found]:
        return self.estate.due(
            self.view, read_here=(), everything=everything, lost=lambda slot, epoch: lost, clock_ms=clock
        )

    def claim(self, kept_ms: int = 0) -> list[Action]:
        """What is done once the claim is read back."""
        (found,) = self.due()
        found.traceparent = TRACE
        (announce,) = self.estate.take(found, self.request, CLOCK, kept_ms)
        assert isinstance(announce, Announce)
        assert announce.record == Claim(DEAD[1], *HEIR, RID)
        assert self.due() == []  # it is on its way
        return self.read(announce.record)


def cancel_reasons(actions: list[Action]) -> list[str]:
    return [action.record.reason for action in actions if isinstance(action, Cancel)]


def test_nothing_is_taken_from_an_owner_that_lives_or_for_nobody() -> None:
    desk = Desk()
    assert desk.due(lost=False) == []
    assert desk.due(everything=False) == []
    (found,) = desk.due()
    assert (found.state.request_at, found.first_offset) == ((2, 17), 41)
    assert desk.estate.oldest(PARTITION) == 41


def test_what_nobody_waits_for_is_cancelled_and_what_has_time_goes_on() -> None:
    assert cancel_reasons(Desk().claim()) == ["disconnected"]
    assert Desk(detach_ms=9_000).claim() == []
    assert Desk().claim(kept_ms=2_000) == []
    read = Desk()
    read.read(Attach(RID, 2, 80))
    assert read.claim() == []
    assert read.owner.open[RID].state.token_ids == [97, 98]
    assert read.owner.oldest(PARTITION) == 41
    assert not read.estate.found


def test_the_claim_of_another_is_respected() -> None:
    desk = Desk()
    (found,) = desk.due()
    (announce,) = desk.estate.take(found, desk.request, CLOCK, 0)
    desk.read(Claim(DEAD[1], 2, 80, RID))
    assert isinstance(announce, Announce)
    assert isinstance(announce.record, Claim)
    assert desk.read(announce.record) == []
    assert RID not in desk.owner.open
    assert (found.state.owner_slot, found.state.owner_epoch) == (2, 80)


def test_what_the_lost_owner_had_begun_is_done() -> None:
    desk = Desk(detach_ms=9_000)
    desk.read(Retry(RID, 2, DEAD[1], "worker_lost"))
    cancel, sent = desk.claim()
    assert isinstance(cancel, Cancel)
    assert (cancel.record.attempt, cancel.behind_request) == (1, False)
    assert isinstance(sent, SendRequest)
    assert sent.owned.traceparent == TRACE
    request = sent.owned.request
    assert (request.attempt, request.output_token_ids, request.owner_epoch) == (2, [97, 98], HEIR[1])


def test_it_goes_on_with_no_more_than_admission_let_it_have() -> None:
    desk = Desk(detach_ms=9_000)
    desk.read(Retry(RID, 2, DEAD[1], "worker_lost"))
    desk.read(Dispatched(RID, 2, DEAD[1], 0, WORKER_EPOCH, "simulated", 2, 18, max_tokens=5))
    desk.read(Retry(RID, 3, DEAD[1], "worker_lost"))
    assert desk.request.sampling.max_tokens > 5
    *_, sent = desk.claim()
    assert isinstance(sent, SendRequest)
    assert sent.owned.request.sampling.max_tokens == 5


def test_a_client_that_asked_for_the_end_gets_it() -> None:
    for tenant, reasons in (("acme", ["cancelled"]), ("other", [])):
        desk = Desk(detach_ms=9_000)
        desk.read(Cancellation(RID, 9, tenant, "cancelled"))
        assert cancel_reasons(desk.claim()) == reasons


@pytest.mark.parametrize("code", ["worker_lost", "engine_fault"])
def test_an_end_that_its_owner_may_not_have_billed_is_billed(code: str) -> None:
    desk = Desk()
    desk.read(Failed(RID, 1, DEAD[1], code, "gone"))
    (found,) = desk.due()
    _, bill = desk.estate.take(found, desk.request, CLOCK, 0)
    assert isinstance(bill, Bill)
    tokens = 0 if code == "engine_fault" else 2
    assert (bill.record.output_tokens, bill.record.sealed, bill.record.finish_reason) == (
        tokens,
        True,
        "error",
    )
    assert desk.due() == []
    assert not desk.estate.any_open


def test_an_attempt_that_ended_early_waits_for_its_owner_and_then_is_over() -> None:
    desk = Desk()
    desk.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "cancelled"))
    (found,) = desk.due()
    assert desk.estate.take(found, desk.request, CLOCK, 0) == []
    assert desk.due() == []  # nobody reads it: it may have been cancelled on purpose
    assert desk.estate.oldest(PARTITION) == 41
    desk.estate.forget(CLOCK + RETRY_WAIT_MS)
    assert not desk.estate.any_open
    desk.estate.forget(CLOCK + FORGET_MS)
    assert not desk.estate.found


def test_what_has_ended_is_within_reach_while_admission_may_speak_of_it() -> None:
    desk = Desk()
    desk.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "length"))
    # Who reads on from here takes late words of it for what they are, and bills nothing again.
    desk.estate.fed_clock = CLOCK + LATE_ADMITTED_MS
    assert desk.estate.oldest(PARTITION) == 41
    desk.read(Admitted(RID, 1, DEAD[1], 2, 17))
    assert desk.due() == []
    desk.estate.fed_clock = CLOCK + SETTLED_MS
    assert desk.estate.oldest(PARTITION) is None


@pytest.mark.parametrize("detach_ms", [0, 9_000])
def test_of_one_that_admission_did_not_read_its_place_is_enough(detach_ms: int) -> None:
    desk = Desk(detach_ms)
    desk.estate.found.clear()
    desk.read(Admitted(RID, 1, DEAD[1], 2, 17))
    (action,) = desk.claim()
    if detach_ms:
        assert isinstance(action, SendRequest)
        assert (action.owned.request.attempt, action.owned.request.owner_epoch) == (1, HEIR[1])
        return
    assert isinstance(action, Reply)
    assert isinstance(action.record, Failed)
    _, bill = desk.owner.on_record(action.record, 1_000)
    assert isinstance(bill, Bill)
    assert (bill.record.sealed, bill.record.input_tokens, bill.record.output_tokens) == (True, 0, 0)


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_attempt_that_ended_early_while_its_owner_was_dead_goes_on_for_who_may_come_back(
    reason: str,
) -> None:
    desk = Desk(detach_ms=9_000)
    desk.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, reason))
    (action,) = desk.claim()
    assert isinstance(action, Reply)
    if reason == "cancelled":
        assert action.record == Retry(RID, 2, HEIR[1], "worker_cancelled")
    else:
        assert isinstance(action.record, Failed)
    assert action.traceparent == TRACE
    late = Desk(detach_ms=9_000)
    late.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, reason))
    (found,) = late.due()
    assert late.estate.take(found, late.request, CLOCK + 9_000, 0) == []
    unwanted = Desk(detach_ms=9_000)
    unwanted.read(Cancellation(RID, 1, "acme", "disconnected"))  # its owner has said why
    unwanted.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, reason))
    assert unwanted.due() == []


def test_what_was_waived_costs_nothing_whoever_bills_it() -> None:
    word = Cancellation(RID, 1, "acme", "token_rate_exceeded", waived=True)
    running = Desk()
    running.read(word)
    assert cancel_reasons(running.claim()) == ["token_rate_exceeded"]
    end = Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "cancelled")
    (bill,) = running.owner.on_record(end, 2_000)
    assert isinstance(bill, Bill)
    assert ("traceparent", TRACE.encode()) in bill.headers
    ended = Desk()
    ended.read(word)
    ended.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "length"))
    (found,) = ended.due()
    (late_bill,) = ended.estate.take(found, ended.request, CLOCK, 0)
    for action in (bill, late_bill):
        assert isinstance(action, Bill)
        usage = action.record
        assert (usage.input_tokens, usage.output_tokens, usage.sealed) == (0, 0, True)
    other = Desk()
    other.read(Cancellation(RID, 1, "other", "token_rate_exceeded", waived=True))
    other.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "length"))
    (found,) = other.due()  # whose word it is shows when the request is read
    assert other.estate.take(found, other.request, CLOCK, 0) == []


def test_what_runs_on_behind_the_end_is_stopped_and_its_row_outranked() -> None:
    desk = Desk()
    desk.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "length"))
    assert desk.due() == []
    desk.read(Tokens.of(1, 99, [TokenChunk(RID, 1, 0, [97, 98, 99])]))
    (found,) = desk.due()
    stop, bill = desk.estate.take(found, desk.request, CLOCK, 0)
    assert isinstance(stop, Cancel)
    assert (stop.record.slot, stop.record.epoch) == (1, 99)
    assert isinstance(bill, Bill)
    assert (bill.record.sealed, bill.record.output_tokens, bill.record.ended_at) == (True, 2, 1_000)
    assert desk.due() == []
    failed = Desk()
    failed.read(Failed(RID, 1, DEAD[1], "worker_lost", "it was lost"))
    (found,) = failed.due()
    stop, bill = failed.estate.take(found, failed.request, CLOCK, 0)
    assert isinstance(stop, Cancel)
    assert (stop.record.reason, stop.record.attempt, stop.record.slot) == ("worker_lost", 1, None)
    assert isinstance(bill, Bill)


@pytest.mark.parametrize("lost", ["a Completion that nobody asked for", "a gap"])
def test_what_its_owner_would_have_retried_is_retried(lost: str) -> None:
    desk = Desk()
    desk.read(Attach(RID, 2, 80))
    if lost == "a gap":
        desk.tokens(5, b"x")
    else:
        desk.read(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 2, "cancelled"))
    (reply,) = desk.claim()
    assert isinstance(reply, Reply)
    assert isinstance(reply.record, Retry)
    assert (reply.record.attempt, reply.record.owner_epoch) == (2, HEIR[1])
    _, sent = desk.owner.on_record(reply.record, 1_000)
    assert isinstance(sent, SendRequest)
    assert sent.owned.request.output_token_ids == [97, 98]


def test_a_request_that_is_not_where_it_should_be_is_let_lie() -> None:
    desk = Desk()
    (found,) = desk.due()
    assert desk.estate.take(found, None, CLOCK, 0) == []
    assert desk.due() == []
    assert not desk.estate.any_open


class Watch:
    """Gateway (0, 90) among others, with a clock moved by hand."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.view.watch_as("gateway", *HEIR)
        self.time = 1_000_000
        self.beating = {HEIR}
        self.pass_ms(200)
        self.slots = SlotWatch(self.view, *HEIR, succession_ms=5_000)

    def pass_ms(self, duration: int) -> None:
        for _ in range(duration // 100):
            self.time += 100
            for slot, epoch in self.beating:
                self.view.on_heartbeat(Heartbeat("gateway", slot, epoch, b""), self.time)


def test_an_owner_is_lost_by_silence_or_by_a_next_life() -> None:
    watch = Watch()
    watch.beating.add(DEAD)
    watch.pass_ms(500)
    assert not watch.slots.lost(*DEAD)
    watch.beating.remove(DEAD)
    watch.pass_ms(1_500)
    assert watch.slots.lost(*DEAD)
    assert watch.slots.lost(0, 89)  # an earlier life of the watcher's own slot
    assert not watch.slots.lost(*HEIR)


def test_an_owner_that_was_never_heard_is_lost_after_a_while() -> None:
    watch = Watch()
    watch.pass_ms(2_500)
    assert not watch.slots.lost(2, 33)
    watch.pass_ms(1_000)
    assert watch.slots.lost(2, 33)


def test_a_vacant_slot_falls_to_the_lowest_gateway_that_lives() -> None:
    watch = Watch()
    watch.beating |= {DEAD, (2, 80)}
    watch.pass_ms(500)
    watch.beating.remove(DEAD)
    watch.pass_ms(4_900)
    assert watch.slots.to_see_to(3) == set()
    watch.pass_ms(300)
    assert watch.slots.to_see_to(3) == {1}
    other = SlotWatch(watch.view, 2, 80, succession_ms=5_000)
    assert other.to_see_to(3) == set()
    watch.beating.add((1, 95))  # its next life
    watch.pass_ms(200)
    assert watch.slots.to_see_to(3) == set()
    assert watch.slots.lost(*DEAD)
