"""How processes share workers' room: the parts of a room, and who may take at all."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Heartbeat, PartitionStatus, QueuedTokens
from streams.admission.shares import NOTHING, PeerDemand, Share

MODEL = "m"
Demands = dict[int, dict[int, int]]  # slot → class → tokens that wait


def says(slot: int, queued: dict[int, int], model: str = MODEL) -> Heartbeat:
    statuses = [
        PartitionStatus(priority, 0, 0, [QueuedTokens(model, priority, tokens)])
        for priority, tokens in queued.items()
    ]
    return Heartbeat("admission", slot, 1, b"", partitions=statuses)


def processes(demands: Demands) -> dict[int, PeerDemand]:
    """All processes, each of which has heard all others."""
    peers = {slot: PeerDemand(slot) for slot in demands}
    for slot, peer in peers.items():
        for other, queued in demands.items():
            peer.heard(says(other, queued))
        assert slot in demands
    return peers


def parts(demands: Demands, priority: int, room: int, worker: int, heard_at: int) -> dict[int, int]:
    found = {}
    for slot, peer in processes(demands).items():
        own = demands[slot].get(priority, 0)
        if own:
            share = peer.share(MODEL, priority, own)
            found[slot] = room if share is None else share.of(room, worker, heard_at)
    return found


demands = st.dictionaries(
    st.integers(0, 9),
    st.dictionaries(st.integers(0, 2), st.integers(0, 10**6), max_size=3),
    min_size=1,
    max_size=6,
)


@given(demands, st.integers(0, 2), st.integers(0, 2_000), st.integers(0, 9), st.integers(0, 2**41))
def test_parts_add_up_to_the_room_and_follow_the_queues(
    demands: Demands, priority: int, room: int, worker: int, heard_at: int
) -> None:
    found = parts(demands, priority, room, worker, heard_at)
    if not found:
        return
    if any(queued.get(higher) for queued in demands.values() for higher in range(priority)):
        # Whoever knows of a higher class elsewhere takes nothing; who has it itself serves that first.
        alone = [s for s, q in demands.items() if any(q.get(higher) for higher in range(priority))]
        assert all(taken == 0 for slot, taken in found.items() if alone != [slot])
        return
    assert sum(found.values()) == room
    total = sum(demands[slot][priority] for slot in found)
    for slot, taken in found.items():
        assert abs(taken - room * demands[slot][priority] / total) < 1 + 1e-6


@given(demands, st.integers(0, 2))
def test_a_lone_busy_process_gets_all(demands: Demands, priority: int) -> None:
    lone: Demands = {slot: {} for slot in demands} | {3: {priority: 500}}
    assert parts(lone, priority, 7, 0, 123) == {3: 7}


def test_a_single_seat_goes_round_by_the_size_of_the_queues() -> None:
    demands: Demands = {0: {0: 100}, 1: {0: 300}, 2: {0: 600}}
    taken: Counter[int] = Counter()
    for beat in range(2_000):
        found = parts(demands, 0, 1, 4, 1_700_000_000_000 + 100 * beat)
        assert sorted(found.values()) == [0, 0, 1]
        taken.update(found)
    assert taken[0] == pytest.approx(200, rel=0.2)
    assert taken[1] == pytest.approx(600, rel=0.2)
    assert taken[2] == pytest.approx(1_200, rel=0.2)


def test_nobody_takes_a_lower_class_while_another_queues_a_higher() -> None:
    peer = PeerDemand(0)
    peer.heard(says(1, {0: 10}))
    assert peer.share(MODEL, 2, 100) is NOTHING
    assert NOTHING.of(1_000, 0, 0) == 0
    assert peer.share(MODEL, 0, 10) == Share(0, 10, 20)
    assert peer.share("another model", 2, 100) is None
    peer.heard(says(1, {1: 10}))
    assert peer.share(MODEL, 0, 10) is None  # what waits there is of a lower class
    peer.heard(says(1, {}))
    assert peer.share(MODEL, 2, 100) is None


def test_a_process_that_is_gone_has_no_share() -> None:
    peer = PeerDemand(0)
    peer.heard(says(1, {0: 10}))
    peer.heard(says(2, {0: 10}))
    peer.retain({0, 2})
    assert peer.share(MODEL, 0, 10) == Share(0, 10, 20)
    peer.retain({0})
    assert peer.share(MODEL, 0, 10) is None


def test_an_earlier_life_of_this_slot_is_not_another_process() -> None:
    peer = PeerDemand(1)
    peer.heard(says(1, {0: 10}))
    assert peer.share(MODEL, 2, 10) is None


def test_partitions_of_a_process_add_up() -> None:
    peer = PeerDemand(5)
    heartbeat = says(1, {0: 10})
    heartbeat.partitions *= 3
    peer.heard(heartbeat)
    assert peer.share(MODEL, 0, 10) == Share(30, 10, 40)
