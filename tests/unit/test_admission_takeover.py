from hypothesis import given
from hypothesis import strategies as st

from streams.admission.takeover import Takeover


def test_skips_what_lies_below_the_end_at_takeover() -> None:
    takeover = Takeover()
    assert not takeover.accept(3, 0)  # not held yet
    takeover.assign({3: 5})
    assert [takeover.accept(3, offset) for offset in range(8)] == [False] * 5 + [True] * 3
    assert takeover.offsets(3) == (5, 8)


def test_serves_no_record_twice() -> None:
    takeover = Takeover()
    takeover.assign({0: 0})
    assert takeover.accept(0, 0)
    assert not takeover.accept(0, 0)


def test_a_partition_that_stays_goes_on_where_it_was() -> None:
    takeover = Takeover()
    takeover.assign({0: 0, 1: 0})
    assert takeover.accept(0, 0)
    assert takeover.assign({0: 7}) == {1}
    assert takeover.offsets(0) == (0, 1)
    assert takeover.accept(0, 1)
    assert takeover.partitions() == [0]


def test_a_partition_that_another_took_over_starts_anew() -> None:
    takeover = Takeover()
    takeover.assign({0: 4})
    assert not takeover.heard(0, 4)
    assert takeover.heard(0, 6)
    assert not takeover.heard(0, 6)
    assert not takeover.accept(0, 7)
    assert takeover.partitions() == []
    assert takeover.assign({0: 9}) == {0}
    assert takeover.offsets(0) == (9, 9)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_each_offset_is_accepted_once_in_order_and_never_below_the_takeover(
    steps: list[tuple[bool, int]],
) -> None:
    takeover, accepted = Takeover(), list[int]()
    for assign, offset in steps:
        if assign:
            takeover.assign({0: offset})
        elif takeover.accept(0, offset):
            assert offset >= takeover.offsets(0)[0]
            accepted.append(offset)
    assert accepted == sorted(set(accepted))
