"""What is committed of a tenant's requests: never lost, never answered twice, in any order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.ledger.source_window import MAX_SPAN, SourceWindow


@given(
    offsets=st.sets(st.integers(100, 160), min_size=1, max_size=40).map(sorted),
    data=st.data(),
)
def test_a_restart_opens_exactly_what_was_not_answered(offsets: list[int], data: st.DataObject) -> None:
    window = SourceWindow(100)
    answered: set[int] = set()
    for offset in offsets:
        assert window.take(offset)
        if data.draw(st.booleans()):
            done = data.draw(st.sampled_from(sorted(set(offsets[: offsets.index(offset) + 1]) - answered)))
            window.answer(done)
            answered.add(done)
        if data.draw(st.booleans()):  # a crash behind a commit
            committed = window.commit()
            assert committed[0] == window.low
            window = SourceWindow(*committed)
            for again in (o for o in offsets if committed[0] <= o <= offset):
                assert window.take(again) == (again not in answered)
            assert window.open == len([o for o in offsets if o <= offset]) - len(answered)


def test_a_record_of_several_requests_takes_the_room_of_as_many() -> None:
    window = SourceWindow(0)
    window.take(0)
    window.take(1)
    window.weigh(1, 4)
    assert (window.open, window.room(6), window.room(5)) == (2, 1, 0)
    window.answer(1)
    assert window.room(6) == 5


def test_room_is_bounded_by_open_and_by_span() -> None:
    window = SourceWindow(0)
    assert window.room(3) == 3
    for offset in range(3):
        window.take(offset)
    assert window.room(3) == 0
    window.answer(1)
    assert window.room(3) == 1
    window.take(MAX_SPAN - 1)
    assert window.room(100) == 0  # offset 0 is still open
    window.answer(0)
    assert window.room(100) == 2  # now 2 is the lowest


def test_the_largest_state_fits_kafkas_metadata() -> None:
    window = SourceWindow(5)
    for offset in range(5, 5 + MAX_SPAN):
        window.take(offset)
    for offset in range(6, 5 + MAX_SPAN):
        window.answer(offset)
    low, metadata = window.commit()
    assert low == 5
    assert len(metadata) <= 4096
    assert SourceWindow(low, metadata).commit() == (low, metadata)


def test_what_is_read_twice_is_a_fault() -> None:
    window = SourceWindow(7)
    window.take(7)
    with pytest.raises(ValueError, match="read before"):
        window.take(7)


@pytest.mark.parametrize("metadata", ["0:", "garbage", "1:!!!"])
def test_metadata_of_others_are_refused(metadata: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        SourceWindow(0, metadata)
