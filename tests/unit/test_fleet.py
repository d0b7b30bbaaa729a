"""Silence on the log's clock: nobody is accused by a stalled broker or a watcher that slept."""

from dataclasses import replace

from schemas.fleet import FleetView, LogClock
from schemas.records import Drain, Heartbeat, Join, Left
from tests.fleet_driver import worker_status


def beat(role: str, slot: int, epoch: int) -> Heartbeat:
    return Heartbeat(role, slot, epoch, b"n")


def fleet(*, until: int, worker_until: int | None = None, start: int = 0) -> FleetView:
    """A gateway (slot 0, epoch 1) that watches and a worker (slot 0, epoch 2); heartbeats per 100 ms."""
    view = FleetView()
    view.watch_as("gateway", 0, 1)
    for now in range(start, until + 1, 100):
        view.on_heartbeat(beat("gateway", 0, 1), now)
        if worker_until is None or now <= worker_until:
            view.on_heartbeat(beat("worker", 0, 2), now)
    return view


def test_a_silent_slot_is_lost_after_one_second_of_log() -> None:
    assert fleet(until=1900, worker_until=1000).gone("worker", 0, 2) is None
    assert fleet(until=2000, worker_until=1000).gone("worker", 0, 2) == "silent"


def test_a_stalled_broker_ages_nobody() -> None:
    view = fleet(until=1000)
    view.on_heartbeat(beat("gateway", 0, 1), 9000)
    assert view.gone("worker", 0, 2) is None
    view.on_heartbeat(beat("worker", 0, 2), 9050)
    assert view.clock.now_ms == 1050


def test_a_watcher_that_slept_accuses_nobody_until_its_own_heartbeat_comes_back() -> None:
    view = fleet(until=1000)
    # The watcher sleeps; a third process heartbeats, the worker is really gone.
    for now in range(1100, 4000, 100):
        view.on_heartbeat(beat("worker", 1, 3), now)
    assert not view.may_judge
    assert view.gone("worker", 0, 2) is None
    view.on_heartbeat(beat("gateway", 0, 1), 4000)
    assert view.gone("worker", 0, 2) == "silent"


def test_who_never_joined_the_watch_judges_nobody() -> None:
    view = FleetView()
    view.on_heartbeat(beat("worker", 0, 2), 0)
    for now in range(100, 3000, 100):
        view.on_heartbeat(beat("worker", 1, 3), now)
    assert view.gone("worker", 0, 2) is None


def test_left_counts_at_once_and_only_for_that_life() -> None:
    view = fleet(until=100)
    view.on_event(Left("worker", 0, 1, "an older life"), 50)
    assert view.gone("worker", 0, 2) is None
    view.on_event(Left("worker", 0, 2, "signal 9"), 51)
    assert view.gone("worker", 0, 2) == "left: signal 9"
    assert view.live("worker") == []


def test_the_offset_of_a_join_is_the_epoch_and_supersedes() -> None:
    view = fleet(until=100)
    view.on_event(Join("worker", 0, b"x"), 77)
    assert view.gone("worker", 0, 2) == "superseded by epoch 77"
    assert view.epoch_of("worker", 0) == 77
    view.on_heartbeat(beat("worker", 0, 2), 200)  # the old life is still talking
    assert view.epoch_of("worker", 0) == 77
    assert view.live("worker") == []
    view.on_heartbeat(beat("worker", 0, 77), 210)
    assert [m.epoch for m in view.live("worker")] == [77]


def test_a_life_not_yet_seen_is_not_gone() -> None:
    assert fleet(until=100).gone("worker", 0, 3) is None
    assert fleet(until=100).gone("worker", 5, 3) is None


def test_drain_marks_the_member() -> None:
    view = fleet(until=100)
    view.on_event(Drain("worker", 0, 2), 60)
    assert [m.draining for m in view.live("worker")] == [True]


def test_the_clock_never_runs_backwards() -> None:
    clock = LogClock()
    assert [clock.advance(t) for t in (1000, 1100, 1050, 1100, 1150, 5000, 5200)] == [
        0,
        100,
        100,
        100,
        150,
        150,
        350,
    ]


def test_which_canary_passed_is_that_run_s_own_word() -> None:
    view = FleetView()
    assert view.canary_passed(0, 2) == 0
    status = replace(worker_status("simulated"), canary_passed=7)
    view.on_heartbeat(Heartbeat("worker", 0, 2, b"", worker=status), 1_000)
    assert (view.canary_passed(0, 2), view.canary_passed(0, 3)) == (7, 0)
    view.on_event(Left("worker", 0, 2, "killed"), 9)
    assert view.canary_passed(0, 2) == 7
