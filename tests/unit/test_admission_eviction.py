"""Which dead admission processes the living put out of their consumer group."""

from schemas.fleet import FleetView
from schemas.records import Heartbeat, Join, Left
from streams.admission.eviction import Evictions


class Watcher:
    """One admission process and what it hears: heartbeats of processes (slot, epoch), 100 ms apart."""

    def __init__(self, slot: int = 0, epoch: int = 10) -> None:
        self.fleet = FleetView()
        self.fleet.watch_as("admission", slot, epoch)
        self.evictions = Evictions(slot, self.fleet)
        self.time = 0

    def hear(self, *lives: tuple[int, int], beats: int = 1) -> None:
        for _ in range(beats):
            self.time += 100
            for slot, epoch in lives:
                self.fleet.on_heartbeat(Heartbeat("admission", slot, epoch, b""), self.time)

    def left(self, slot: int, epoch: int) -> None:
        self.fleet.on_event(Left("admission", slot, epoch, "stopped"), 99)


def test_one_that_is_silent_for_a_second_is_put_out_once() -> None:
    watcher = Watcher()
    watcher.hear((0, 10), (1, 11))
    watcher.hear((0, 10), beats=9)
    assert watcher.evictions.due() == []
    watcher.hear((0, 10))
    assert watcher.evictions.due() == [(1, 11)]
    assert watcher.evictions.due() == [(1, 11)]  # tried again until it is done
    watcher.evictions.done(1, 11)
    assert watcher.evictions.due() == []


def woken() -> Watcher:
    """It has put out the process of slot 1, which was only held up."""
    watcher = Watcher()
    watcher.hear((0, 10), (1, 11))
    watcher.hear((0, 10), beats=10)
    watcher.evictions.done(*watcher.evictions.due()[0])
    watcher.hear((0, 10), (1, 11))
    assert not watcher.evictions.is_over(1, 11)
    assert watcher.evictions.due() == []
    return watcher


def test_one_that_was_only_held_up_is_given_longer_the_next_time() -> None:
    watcher = woken()
    watcher.hear((0, 10), beats=29)
    assert watcher.evictions.due() == []
    watcher.hear((0, 10))
    assert watcher.evictions.due() == [(1, 11)]


def test_one_that_was_held_up_and_leaves_is_put_out_at_once_and_its_next_life_is_like_any_other() -> None:
    watcher = woken()
    watcher.left(1, 11)
    assert watcher.evictions.due() == [(1, 11)]
    watcher.hear((0, 10), (1, 12))
    assert watcher.evictions.due() == []
    watcher.hear((0, 10), beats=10)
    assert watcher.evictions.due() == [(1, 12)]


def test_one_that_says_that_it_leaves_is_put_out_at_once() -> None:
    watcher = Watcher()
    watcher.hear((0, 10), (1, 11))
    watcher.left(1, 11)
    assert watcher.evictions.due() == [(1, 11)]


def test_none_is_put_out_while_its_slot_has_a_later_life() -> None:
    watcher = Watcher()
    watcher.hear((0, 10), (1, 11))
    watcher.left(1, 11)
    watcher.fleet.on_event(Join("admission", 1, b"", None, None), 12)
    assert watcher.evictions.due() == []
    assert not watcher.evictions.is_over(1, 11)
    watcher.hear((0, 10), beats=10)
    assert watcher.evictions.due() == [(1, 12)]  # that one never came to life


def test_the_lowest_that_lives_does_it() -> None:
    watcher = Watcher(slot=2, epoch=12)
    watcher.hear((0, 10), (1, 11), (2, 12))
    watcher.left(1, 11)
    assert watcher.evictions.due() == []
    watcher.left(0, 10)
    assert watcher.evictions.due() == [(0, 10), (1, 11)]


def test_one_that_was_stopped_itself_accuses_nobody() -> None:
    watcher = Watcher()
    watcher.hear((0, 10), (1, 11))
    watcher.hear((2, 12), beats=20)  # its own do not come back
    assert watcher.evictions.due() == []
