"""In which order classes are served: the higher one first, with a floor for the next while there is room."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.fleet import Member
from schemas.priority import PriorityClass
from schemas.records import Heartbeat
from streams.admission.backlog import Backlog
from streams.admission.fair_queue import QueuedRequest
from streams.admission.model_queue import FLOOR
from streams.admission.router import Router
from streams.admission.shares import PeerDemand
from streams.admission.shedding import ShedLevel
from tests.admission_harness import MODEL, make_request, make_status

INTERACTIVE, FREE, BATCH = PriorityClass


def member(**status: Any) -> Member:
    status = {"num_blocks": 10_000, "free_blocks": 10_000, "max_num_seqs": 100_000, **status}
    return Member("worker", 0, 10, 0, Heartbeat("worker", 0, 10, b"", worker=make_status(**status)))


def backlog(**status: Any) -> tuple[Router, Backlog]:
    router = Router()
    router.update([member(**status)])
    return router, Backlog(router, PeerDemand(0))


def put(queue: Backlog, priority: int, tokens: int = 100, attempt: int = 1) -> QueuedRequest:
    request = make_request(priority=priority, attempt=attempt)
    item = QueuedRequest(request, priority, 0, tokens, 1, 0, 0)
    queue.append(item, 1.0)
    return item


def served(queue: Backlog, most: int, level: ShedLevel = ShedLevel.NONE) -> list[QueuedRequest]:
    found = []
    for item, worker in queue.take(MODEL, level):
        assert worker is not None
        found.append(item)
        if len(found) == most:
            break
    return found


@given(st.lists(st.integers(1, 40), min_size=50, max_size=50), st.sampled_from([INTERACTIVE, FREE]))
def test_the_next_class_gets_its_floor_and_not_more(costs: list[int], upper: PriorityClass) -> None:
    _, queue = backlog()
    for cost in costs:
        put(queue, upper, cost)
        put(queue, upper + 1, cost)
    taken = served(queue, 50)
    work = [sum(item.tokens for item in taken if item.request.priority == c) for c in PriorityClass]
    assert work[upper + 1] <= FLOOR * work[upper] + 1e-6
    assert work[upper + 1] > FLOOR * (work[upper] - max(costs)) - max(costs)


def test_batch_gets_nothing_while_interactive_waits() -> None:
    _, queue = backlog()
    for priority in (INTERACTIVE, BATCH):
        for _ in range(100):
            put(queue, priority)
    assert {item.request.priority for item in served(queue, 100)} == {INTERACTIVE}
    assert {item.request.priority for item in served(queue, 100)} == {BATCH}


def test_there_is_no_floor_without_room_or_under_overload() -> None:
    for status, level in (({"free_blocks": 1_000}, ShedLevel.NONE), ({}, ShedLevel.CAP_FREE)):
        _, queue = backlog(**status)
        for _ in range(100):
            put(queue, INTERACTIVE)
            put(queue, FREE)
        assert {item.request.priority for item in served(queue, 100, level)} == {INTERACTIVE}


def test_batch_waits_while_it_is_paused_but_for_retries() -> None:
    _, queue = backlog()
    put(queue, BATCH)
    retry = put(queue, BATCH, attempt=2)
    assert served(queue, 5, ShedLevel.PAUSE_BATCH) == [retry]
    assert len(served(queue, 5)) == 1


def test_batch_leaves_room_for_what_is_interactive() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"num_blocks": 100, "free_blocks": 12, "num_running": 1}, True),
        ({"num_blocks": 100, "free_blocks": 10, "num_running": 1}, False),  # nothing left above the watermark
        ({"num_blocks": 2, "free_blocks": 2}, True),  # an idle worker runs anything that fits
        ({"num_waiting": [1, 0, 0]}, False),
        ({"num_waiting": [0, 1, 1]}, True),
    ]
    for status, taken in cases:
        _, queue = backlog(**status)
        put(queue, BATCH)
        assert bool(served(queue, 1)) == taken, status
        _, queue = backlog(**status)
        put(queue, FREE)
        assert served(queue, 1), status
