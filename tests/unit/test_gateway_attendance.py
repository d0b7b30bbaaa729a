"""A request whose client left: who keeps it running, and for how long."""

import pytest

from gateway.actions import Action, Announce, Cancel, SendRequest
from gateway.attendance import detach_ms, start_ms
from gateway.metrics import Timing
from gateway.owned_request import OwnedRequest
from gateway.owner import Owner
from gateway.reader import WholeReader
from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.records import Attach, Cancellation, Claim, Completion, Detach, Heartbeat, Left
from tests.gateway_factories import EPOCH, SLOT, WORKER_EPOCH, inference_request

RID = bytes(range(16))
OTHER = (2, 90)  # slot and epoch of another gateway


class Desk:
    """An owner with one request, whose client asked for `detach_ms`."""

    def __init__(self, detach_ms: int = 0) -> None:
        self.owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000, kept_ms=3_000)
        self.view = FleetView()
        self.view.watch_as("gateway", SLOT, EPOCH)
        self.reader = WholeReader("simulated", Timing(), 0.0)
        self.owned: OwnedRequest = self.owner.accept(inference_request(RID), self.reader)
        self.owned.detach_ms = detach_ms
        self.time = 1_000_000
        self.silent: set[int] = set()

    def pass_ms(self, duration: int) -> list[Action]:
        actions: list[Action] = []
        for _ in range(duration // 100):
            self.time += 100
            for slot, epoch in ((SLOT, EPOCH), OTHER):
                if slot not in self.silent:
                    self.view.on_heartbeat(Heartbeat("gateway", slot, epoch, b""), self.time)
            actions += self.owner.tick(self.view, 2_000, 0.0)
        return actions

    def attach(self) -> list[Action]:
        return self.owner.on_record(Attach(RID, *OTHER), self.time)

    def detach(self, ms: int = 0) -> list[Action]:
        return self.owner.on_record(Detach(RID, *OTHER, ms), self.time)

    def leave(self) -> list[Action]:
        return self.owner.leave(self.owned, "disconnected")


def reasons(actions: list[Action]) -> list[str]:
    assert all(isinstance(action, Cancel) for action in actions)
    return [action.record.reason for action in actions if isinstance(action, Cancel)]


def told_reasons(actions: list[Action]) -> list[str]:
    """Readers elsewhere learn first that no retry will come."""
    announced = [action.record for action in actions if isinstance(action, Announce)]
    cancelled = [action for action in actions if isinstance(action, Cancel)]
    assert announced == [cancel.record for cancel in cancelled]
    assert len(actions) == 2 * len(cancelled)
    return reasons([*cancelled])


def test_a_client_that_leaves_without_detach_cancels_at_once() -> None:
    assert reasons(Desk().leave()) == ["disconnected"]


def test_a_request_goes_on_for_its_detach_time() -> None:
    desk = Desk(detach_ms=1_000)
    desk.pass_ms(5_000)  # the client still waits
    assert desk.leave() == []
    assert desk.pass_ms(1_000) == []
    assert told_reasons(desk.pass_ms(200)) == ["disconnected"]
    assert desk.pass_ms(1_000) == []


def test_an_attach_within_the_detach_time_keeps_it() -> None:
    desk = Desk(detach_ms=1_000)
    desk.leave()
    desk.pass_ms(900)
    desk.attach()
    assert desk.pass_ms(10_000) == []
    desk.detach()
    assert desk.pass_ms(1_000) == []  # the time begins anew
    assert told_reasons(desk.pass_ms(200)) == ["disconnected"]


def test_a_reader_elsewhere_keeps_it_without_detach_time() -> None:
    desk = Desk()
    desk.attach()
    desk.attach()
    assert desk.leave() == []
    desk.detach()
    assert desk.pass_ms(5_000) == []
    desk.detach()
    assert reasons(desk.pass_ms(100)) == ["disconnected"]


def test_a_reader_may_ask_for_more_time() -> None:
    desk = Desk()
    desk.attach()
    desk.leave()
    desk.detach(2_000)
    assert desk.pass_ms(2_000) == []
    assert reasons(desk.pass_ms(200)) == ["disconnected"]


@pytest.mark.parametrize("by_word", [True, False])
def test_readers_of_a_gateway_that_is_gone_do_not_count(by_word: bool) -> None:
    desk = Desk()
    desk.pass_ms(500)
    desk.attach()
    desk.leave()
    assert desk.pass_ms(3_000) == []
    if by_word:
        desk.view.on_event(Left("gateway", *OTHER, "stopped"), 0)
        assert told_reasons(desk.pass_ms(100)) == ["disconnected"]
    else:
        desk.silent.add(OTHER[0])
        assert desk.pass_ms(800) == []
        assert told_reasons(desk.pass_ms(400)) == ["disconnected"]


def test_a_request_that_ended_meanwhile_is_not_cancelled() -> None:
    desk = Desk(detach_ms=1_000)
    desk.leave()
    desk.owner.on_record(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 0, "length"), desk.time)
    assert desk.pass_ms(3_000) == []
    assert desk.owner.open == {}


def test_a_cancellation_at_another_gateway_is_the_owners_own() -> None:
    desk = Desk(detach_ms=60_000)
    assert desk.owner.on_cancellation(Cancellation(RID, 9, "another", "cancelled")) == []
    assert desk.owner.on_cancellation(Cancellation(bytes(16), 9, "acme", "cancelled")) == []
    assert reasons(desk.owner.on_cancellation(Cancellation(RID, 9, "acme", "cancelled"))) == ["cancelled"]
    assert desk.owner.on_cancellation(Cancellation(RID, 9, "acme", "cancelled")) == []
    # Its client is told when the log says the end, and nothing is tried again.
    assert desk.reader.end is None
    end = Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 0, "cancelled")
    assert desk.owner.on_record(end, desk.time) == []
    assert desk.reader.end is end


@pytest.mark.parametrize(
    ("text", "ms"), [(None, 0), (b"0", 0), (b"30", 30_000), (b"0.25", 250), (b"600", 600_000)]
)
def test_the_header(text: bytes | None, ms: int) -> None:
    assert detach_ms({} if text is None else {b"x-headrace-detach": text}, 600.0) == ms


@pytest.mark.parametrize("text", [b"", b"-1", b"600.1", b"1e3", b"inf", b"10 s", b"9" * 400, b"\xff"])
def test_a_header_that_is_no_such_duration(text: bytes) -> None:
    with pytest.raises(ApiError) as error:
        detach_ms({b"x-headrace-detach": text}, 600.0)
    assert (error.value.status, error.value.param) == (400, "X-Headrace-Detach")


def test_who_may_have_been_thought_dead_gives_nothing_up_before_it_has_read_on() -> None:
    desk = Desk()
    desk.pass_ms(100)
    desk.owner.held = True
    assert desk.leave() == []
    assert desk.pass_ms(1_000) == []
    desk.attach()  # the log says that others read
    desk.owner.held = False
    assert desk.pass_ms(1_000) == []
    desk.detach()
    assert reasons(desk.pass_ms(100)) == ["disconnected"]


def test_a_pause_between_ticks_is_noticed() -> None:
    owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
    owner.tick(FleetView(), 0, now=100.0)
    assert owner.feel(100.5)
    assert not owner.feel(101.0)
    owner.tick(FleetView(), 0, now=101.0)
    assert not owner.feel(101.1)  # until someone has read the log to its end


def test_what_another_has_claimed_is_its_own() -> None:
    desk = Desk()
    desk.owner.on_over = lambda owned: pytest.fail("it is the other's to count")
    (word,) = desk.owner.on_record(Claim(EPOCH, *OTHER, RID), desk.time)
    assert isinstance(word, Announce)  # the client here is a reader now
    assert word.record == Attach(RID, SLOT, EPOCH)
    assert desk.pass_ms(5_000) == []
    (word,) = desk.leave()
    assert isinstance(word, Announce)
    assert word.record == Detach(RID, SLOT, EPOCH, 0)
    assert desk.pass_ms(1_000) == []
    # Its owner dies as well: it comes back.
    desk.view.on_event(Left("gateway", *OTHER, "stopped"), 91)
    (claim,) = desk.pass_ms(300)
    assert isinstance(claim, Announce)
    assert claim.record == Claim(OTHER[1], SLOT, EPOCH, RID)
    assert desk.owner.on_record(claim.record, desk.time) == [SendRequest(desk.owned)]
    assert desk.pass_ms(2_000) == []  # who read there may come back
    assert reasons(desk.pass_ms(1_100)) == ["disconnected"]


def test_what_another_owner_cancels_ends_here_without_waiting_for_a_retry() -> None:
    desk = Desk()
    desk.owner.on_record(Claim(EPOCH, *OTHER, RID), desk.time)
    assert desk.owner.on_cancellation(Cancellation(RID, 1, "acme", "deadline")) == []
    end = Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 0, "cancelled")
    assert desk.owner.on_record(end, desk.time) == []
    assert desk.reader.end is end


@pytest.mark.parametrize("ended", [False, True])
def test_who_begins_to_read_what_was_cancelled_learns_so_once(ended: bool) -> None:
    desk = Desk()
    (cancel,) = desk.leave()
    assert isinstance(cancel, Cancel)
    if ended:
        desk.owner.on_record(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 0, "cancelled"), desk.time)
    assert desk.attach() == [Announce(cancel.record, desk.owned.request.reply_partition)]
    assert desk.attach() == []


def test_who_reads_what_ended_by_itself_learns_nothing_more() -> None:
    desk = Desk()
    desk.leave()
    desk.owner.on_record(Completion(RID, 1, 0, WORKER_EPOCH, 3, 0, 0, "length"), desk.time)
    assert desk.attach() == []


@pytest.mark.parametrize(("detach_ms", "read"), [(0, False), (1_000, False), (0, True)])
def test_a_gateway_that_stops_cancels_only_what_nobody_else_waits_for(detach_ms: int, read: bool) -> None:
    desk = Desk(detach_ms)
    if read:
        desk.attach()
    assert reasons(desk.owner.part(desk.owned, "shutting_down")) == (
        [] if detach_ms or read else ["shutting_down"]
    )


def test_how_long_a_client_waits_for_the_first_token() -> None:
    assert start_ms({}) is None
    for text, ms in ((b"0.25", 250), (b"2", 2_000), (b"86400", 86_400_000)):
        assert start_ms({b"x-headrace-start": text}) == ms
    for text in (b"0", b"0.000", b"-1", b"1e3", b"86401", b"soon", b"", b"0.0001"):
        with pytest.raises(ApiError, match="X-Headrace-Start: seconds from") as refused:
            start_ms({b"x-headrace-start": text})
        assert refused.value.status == 400
