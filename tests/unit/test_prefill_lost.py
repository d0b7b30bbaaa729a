"""A request whose prompt another run was to compute, when that one is gone: its owners' decisions."""

from dataclasses import replace

import pytest

from gateway.actions import Action, Cancel, Reply, SendRequest
from gateway.lifecycle import MAX_RETRIES
from schemas.fleet import CanaryStatus
from schemas.records import Dispatched, Heartbeat, Left, Retry
from schemas.stream_state import PREFILL_LOST, Effect, Run, StreamState
from schemas.token_records import TokenChunk
from tests.batch_world import WORKER, World, completion, make_item, tokens
from tests.batch_world import dispatched as item_dispatched
from tests.fleet_driver import worker_status
from tests.gateway_factories import EPOCH, SLOT, WORKER_EPOCH
from tests.unit.test_gateway_owner import RID, Desk, retry

PREFILL = Run(7, WORKER_EPOCH - 1)


class PairedDesk(Desk):
    """Its request is dispatched to a prefill run that heartbeats until it is silent."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill_canary = CanaryStatus.OK
        self.paired()

    def paired(self, attempt: int = 1) -> list[Action]:
        record = Dispatched(
            RID, attempt, EPOCH, 0, WORKER_EPOCH, "simulated",
            prefill_slot=PREFILL.slot, prefill_epoch=PREFILL.epoch,
        )  # fmt: skip
        return self.owner.on_record(record, self.time)

    def pass_ms(self, duration: int) -> list[Action]:
        actions: list[Action] = []
        for _ in range(duration // 100):
            if "prefill" not in self.silent:
                status = replace(worker_status("simulated"), canary=self.prefill_canary)
                beat = Heartbeat("worker", *PREFILL, b"", worker=status)
                self.view.on_heartbeat(beat, self.time)
            actions += super().pass_ms(100)
        return actions

    def prefill_leaves(self) -> list[Action]:
        """As its parent says it: the owner does not wait for a heartbeat."""
        self.view.on_event(Left("worker", *PREFILL, "signal SIGKILL"), 90)
        return self.owner.tick(self.view, 2_000, 0.0)


def test_a_request_that_nobody_has_goes_elsewhere_when_its_prefill_run_leaves() -> None:
    desk = PairedDesk()
    assert desk.pass_ms(300) == []
    said = desk.prefill_leaves()
    assert retry(said) == Retry(RID, 2, EPOCH, PREFILL_LOST)
    assert desk.pass_ms(300) == []  # once
    cancel, send = desk.read_back(said)
    assert isinstance(cancel, Cancel)
    assert (cancel.record.attempt, cancel.record.slot) == (1, None)
    assert send == SendRequest(desk.owned)
    # Admission may hear of the death later. The run that was to decode is not one that it was lost with.
    assert (desk.owned.request.attempt, desk.owned.request.lost_epochs) == (2, [PREFILL.epoch])
    assert desk.owned.state.lost == [PREFILL]
    # An offer that was on its way all the same: it is stopped there.
    (stray,) = desk.tokens(0, b"")
    assert isinstance(stray, Cancel)
    assert (stray.record.attempt, stray.record.epoch) == (1, WORKER_EPOCH)
    # The next attempt is served whole, and lives on.
    desk.dispatched(attempt=2)
    assert desk.pass_ms(1_000) == []
    desk.tokens(0, b"ab", attempt=2)
    desk.complete(2, attempt=2)
    assert desk.answered


def test_a_request_that_nobody_has_goes_elsewhere_when_its_prefill_run_is_silent_or_computes_wrong() -> None:
    desk = PairedDesk()
    desk.pass_ms(300)
    desk.silent.add("prefill")
    assert desk.pass_ms(800) == []
    assert retry(desk.pass_ms(100)).reason == PREFILL_LOST
    desk = PairedDesk()
    desk.pass_ms(300)
    desk.prefill_canary = CanaryStatus.FAILED
    assert retry(desk.pass_ms(100)).reason == PREFILL_LOST


@pytest.mark.parametrize("sign", [b"", b"ab"], ids=["taken", "tokens"])
def test_a_request_that_decode_has_shown_to_have_stays_there(sign: bytes) -> None:
    desk = PairedDesk()
    desk.tokens(0, sign)
    assert desk.prefill_leaves() == []
    assert desk.pass_ms(2_000) == []


def test_a_sign_that_lies_before_the_retry_keeps_the_attempt() -> None:
    desk = PairedDesk()
    said = desk.prefill_leaves()
    desk.tokens(0, b"")
    assert desk.read_back(said) == []
    assert (desk.owned.state.attempt, desk.owned.request.attempt) == (1, 1)
    # It is looked after as before: here its run leaves.
    desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "killed"), 91)
    assert retry(desk.pass_ms(100)).reason == "worker_lost"


def test_what_an_attempt_told_while_it_was_to_be_given_up_counts_when_it_is_kept() -> None:
    desk = PairedDesk()
    said = desk.prefill_leaves()
    desk.tokens(0, b"ab")
    assert desk.complete(2, "cancelled") == []
    again = desk.read_back(said)
    assert retry(again) == Retry(RID, 2, EPOCH, "worker_cancelled")
    desk = PairedDesk()
    said = desk.prefill_leaves()
    desk.tokens(1, b"b")
    assert retry(desk.read_back(said)).reason == "output_gap"
    desk = PairedDesk()
    said = desk.prefill_leaves()
    desk.tokens(0, b"ab")
    desk.complete(2)
    assert desk.answered
    assert desk.read_back(said) == []


def test_a_cancelled_request_and_one_at_its_last_attempt_are_not_given_up_for_it() -> None:
    desk = PairedDesk()
    desk.owner.cancel(desk.owned, "disconnected")
    assert desk.prefill_leaves() == []
    desk = PairedDesk()
    for attempt in range(1, MAX_RETRIES + 1):
        desk.view = type(desk.view)()
        desk.view.watch_as("gateway", SLOT, EPOCH)
        desk.pass_ms(300)
        said = desk.prefill_leaves()
        assert retry(said).attempt == attempt + 1
        desk.read_back(said)
        desk.paired(attempt + 1)
    assert desk.prefill_leaves() == []
    # Nobody has it, then: it ends when there was no sign of it for long enough.
    desk.view = type(desk.view)()
    desk.view.watch_as("gateway", SLOT, EPOCH)
    assert any(isinstance(action, Reply) for action in desk.pass_ms(3_500))


def test_who_takes_it_over_from_the_log_knows_as_much() -> None:
    state = StreamState(RID)
    state.apply(Dispatched(RID, 1, EPOCH, 0, 5, "m", prefill_slot=7, prefill_epoch=4))
    assert state.copy([]).prefill == Run(7, 4)
    # Said twice, and once behind a sign: nothing is taken back.
    state.apply_chunk(Run(0, 5), TokenChunk(RID, 1, 0, []))
    state.apply(Dispatched(RID, 1, EPOCH, 0, 5, "m", prefill_slot=7, prefill_epoch=4))
    assert state.prefill is None
    overtaken = StreamState(RID)
    overtaken.apply_chunk(Run(0, 5), TokenChunk(RID, 1, 0, []))
    overtaken.apply(Dispatched(RID, 1, EPOCH, 0, 5, "m", prefill_slot=7, prefill_epoch=4))
    assert overtaken.prefill is None
    assert overtaken.apply(Retry(RID, 2, EPOCH, PREFILL_LOST)) is Effect.KEPT


def test_a_batch_coordinator_does_likewise() -> None:
    for has_it in (False, True):
        world = World()
        world.accept(make_item())
        first = world.last
        record = item_dispatched(first)
        record.prefill_slot, record.prefill_epoch = 7, WORKER - 1
        world.say(record)
        world.fleet.on_event(Left("worker", 7, WORKER - 1, "killed"), 1)
        actions = world.shard.tick(world.now, world.fleet, {})
        if has_it:
            world.log.append(tokens(first, 0, ""))
        world.do(actions)
        world.read_back()
        assert world.last.attempt == (1 if has_it else 2)
        world.say(item_dispatched(world.last), tokens(world.last, 0, "ab"), completion(world.last, 2))
        assert world.answers()[0]["text"] == "ab"
