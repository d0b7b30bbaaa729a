import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.admission.prediction import (
    FIRST_GUESS,
    GROWTH,
    MIN_ANSWERS,
    NUM_BUCKETS,
    WINDOW,
    LengthSketch,
    OutputPredictor,
)

# Half a bucket: see LengthSketch.quantile.
ERROR = (GROWTH - 1) / (GROWTH + 1) + 1e-9


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=WINDOW - 1),
    st.sampled_from([0.0, 0.25, 0.5, 0.7, 0.9, 1.0]),
)
def test_a_quantile_is_right_to_a_tenth(lengths: list[int], q: float) -> None:
    sketch = LengthSketch()
    for length in lengths:
        sketch.add(length)
    exact = sorted(lengths)[math.floor(q * (len(lengths) - 1))]
    assert abs(sketch.quantile(q) - exact) <= ERROR * exact


def test_an_empty_sketch_knows_nothing() -> None:
    with pytest.raises(ValueError, match="no length"):
        LengthSketch().quantile(0.5)


@given(st.lists(st.integers(0, 10**9), max_size=2_000))
def test_memory_and_counts_are_bounded(lengths: list[int]) -> None:
    sketch = LengthSketch()
    for length in lengths:
        sketch.add(length)
    assert sketch.count < WINDOW
    assert len(sketch._buckets) <= NUM_BUCKETS


def test_what_was_long_ago_fades() -> None:
    sketch = LengthSketch()
    for length in [1_000] * 2_000 + [10] * 2 * WINDOW:
        sketch.add(length)
    assert sketch.quantile(0.7) < 12


def test_expects_the_tenants_quantile_then_the_models_then_a_guess() -> None:
    predictor = OutputPredictor(quantile=0.9)
    assert predictor.expect("a", "m", 1_000) == FIRST_GUESS
    assert predictor.expect("a", "m", 16) == 16
    for _ in range(MIN_ANSWERS):
        for tokens in (100, 100, 400):  # skewed, as lengths are
            predictor.observe("a", "m", tokens)
    assert 360 <= predictor.expect("a", "m", 1_000) <= 440
    assert predictor.expect("a", "other", 1_000) == FIRST_GUESS
    predictor.observe("b", "m", 10)
    assert predictor.expect("b", "m", 1_000) == predictor.expect("a", "m", 1_000)  # one answer says little
    for _ in range(MIN_ANSWERS):
        predictor.observe("b", "m", 0)
    assert predictor.expect("b", "m", 1_000) == 1


def test_the_quantile_asked_for_is_used() -> None:
    cautious, bold = OutputPredictor(quantile=0.9), OutputPredictor(quantile=0.1)
    for predictor in (cautious, bold):
        for tokens in range(100, 1_000, 10):
            predictor.observe("a", "m", tokens)
    assert bold.expect("a", "m", 10_000) < 250 < 800 < cautious.expect("a", "m", 10_000)


def test_prediction_memory_is_bounded() -> None:
    predictor = OutputPredictor(max_keys=10)
    for n in range(100):
        for _ in range(MIN_ANSWERS):
            predictor.observe(f"t{n}", "m", n)
    assert len(predictor) == 10
    assert 90 <= predictor.expect("t99", "m", 1_000) <= 110
