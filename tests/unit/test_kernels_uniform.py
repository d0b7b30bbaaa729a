import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.uniform import uniform
from kernels.uniform_ref import uniform_ref

_MASK = (1 << 64) - 1


def draw(seeds: list[int], positions: list[int]) -> list[float]:
    hashed = np.array([seed & _MASK for seed in seeds], np.uint64)
    drawn: list[float] = uniform(hashed, np.array(positions, np.int64)).tolist()
    return drawn


def test_it_is_a_fixed_function_of_seed_and_position() -> None:
    # Fixed for ever: a resumed request must draw what an older worker would have drawn.
    assert draw([0], [0]) == [pytest.approx(0.6524484863740323, abs=1e-15)]
    assert draw([12345], [678]) == [pytest.approx(0.8468128010864124, abs=1e-15)]
    assert uniform_ref(-1, 7) == uniform_ref((1 << 64) - 1, 7)
    pairs = list(itertools.product(range(50), range(50)))
    assert len(set(draw([seed for seed, _ in pairs], [position for _, position in pairs]))) == 2500


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_it_equals_its_reference(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    assert draw(seeds, positions) == [uniform_ref(*pair) for pair in pairs]


def test_it_is_uniform_along_positions_and_along_seeds() -> None:
    run = list(range(20_000))
    for draws in (draw([5] * 20_000, run), draw(run, [5] * 20_000), draw(run, run)):
        counts = Counter(int(each * 20) for each in draws)
        assert set(counts) == set(range(20))
        statistic = sum((count - 1000) ** 2 / 1000 for count in counts.values())
        assert statistic < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        products = [a * b for a, b in itertools.pairwise(draws)]
        assert math.fsum(products) / len(products) == pytest.approx(0.25, abs=0.01)
