from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Cancellation
from workers.attempt_memory import AttemptMemory
from workers.cancellations import REMEMBER_S, Cancellations

A, B = bytes(15) + b"a", bytes(15) + b"b"


def test_covers_lower_attempts_until_it_forgets() -> None:
    memory = AttemptMemory(10)
    memory.note(A, 2, now=0)
    assert memory.covers(A, 1, 9.9)
    assert memory.covers(A, 2, 9.9)
    assert not memory.covers(A, 3, 1)
    assert not memory.covers(B, 1, 1)
    assert not memory.covers(A, 1, 10)


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 5), st.floats(0, 8)), max_size=30),
    st.floats(0, 12),
)
def test_agrees_with_a_list_of_all_notes(notes: list[tuple[bytes, int, float]], later: float) -> None:
    """The newest note of an id keeps all before it alive, and nothing that expired takes up room."""
    memory = AttemptMemory(10)
    now = 0.0
    model: dict[bytes, tuple[int, float]] = {}
    for request_id, attempt, wait in notes:
        now += wait
        model = {k: v for k, v in model.items() if v[1] > now}
        highest = max(attempt, model[request_id][0]) if request_id in model else attempt
        model[request_id] = (highest, now + 10)
        memory.note(request_id, attempt, now)
        assert len(memory) == len(model)
    now += later
    for request_id in (A, B):
        for attempt in range(1, 7):
            entry = model.get(request_id)
            expected = entry is not None and entry[0] >= attempt and entry[1] > now
            assert memory.covers(request_id, attempt, now) == expected


def cancellation(**fields: Any) -> Cancellation:
    return Cancellation(A, 2, "acme", "gone", **fields)


def test_a_cancellation_covers_attempts_up_to_its_own_for_a_minute() -> None:
    cancellations = Cancellations(slot=3, epoch=70)
    assert cancellations.note(cancellation(), now=0)
    assert cancellations.covers(A, 2, REMEMBER_S - 1)
    assert not cancellations.covers(A, 3, 1)
    assert not cancellations.covers(A, 2, REMEMBER_S + 1)


def test_a_cancellation_of_one_run_counts_only_there() -> None:
    cancellations = Cancellations(slot=3, epoch=70)
    assert not cancellations.note(cancellation(slot=3, epoch=69), now=0)
    assert not cancellations.note(cancellation(slot=2, epoch=70), now=0)
    assert not cancellations.covers(A, 1, 0)
    assert cancellations.note(cancellation(slot=3, epoch=70), now=0)
    assert cancellations.covers(A, 1, 0)
