from hypothesis import given
from hypothesis import strategies as st

from streams.admission.prediction import FIRST_GUESS, OutputPredictor
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


def test_expects_the_mean_of_the_tenant_then_of_the_model_then_a_guess() -> None:
    predictor = OutputPredictor()
    assert predictor.expect("a", "m", 1_000) == FIRST_GUESS
    assert predictor.expect("a", "m", 16) == 16
    for tokens in (10, 20, 30):
        predictor.observe("a", "m", tokens)
    assert predictor.expect("a", "m", 1_000) == 20
    assert predictor.expect("b", "m", 1_000) == 20
    assert predictor.expect("a", "other", 1_000) == FIRST_GUESS
    predictor.observe("c", "m", 0)
    assert predictor.expect("c", "m", 1_000) == 1


def test_the_mean_follows_a_change() -> None:
    predictor = OutputPredictor()
    for tokens in [1_000] * 200 + [10] * 400:
        predictor.observe("a", "m", tokens)
    assert predictor.expect("a", "m", 10_000) < 20


def test_prediction_memory_is_bounded() -> None:
    predictor = OutputPredictor(max_keys=10)
    for n in range(100):
        predictor.observe(f"t{n}", "m", n)
    assert len(predictor) == 10
    assert predictor.expect("t99", "m", 1_000) == 99
