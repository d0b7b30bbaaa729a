import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.records import SamplingParams
from workers.sampler import sample, uniform

VOCAB = 1300  # no multiple of the sampler's chunk


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 3) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_uniform_is_a_fixed_function_of_seed_and_position() -> None:
    # Fixed for ever: a resumed request must draw what an older worker would have drawn.
    assert uniform(0, 0) == pytest.approx(0.6524484863740323, abs=1e-15)
    assert uniform(12345, 678) == pytest.approx(0.8468128010864124, abs=1e-15)
    assert uniform(-1, 7) == uniform((1 << 64) - 1, 7)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_uniform_is_uniform_along_positions_and_along_seeds() -> None:
    for draws in (
        [uniform(5, position) for position in range(20_000)],
        [uniform(seed, 5) for seed in range(20_000)],
        [uniform(step, step) for step in range(20_000)],
    ):
        counts = Counter(int(draw * 20) for draw in draws)
        assert set(counts) == set(range(20))
        statistic = sum((count - 1000) ** 2 / 1000 for count in counts.values())
        assert statistic < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        products = [a * b for a, b in itertools.pairwise(draws)]
        assert math.fsum(products) / len(products) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    "settings_",
    [params(), params(temperature=0.6), params(top_k=8), params(top_p=0.8), params(1.5, 20, 0.7)],
    ids=["softmax", "temperature", "top_k", "top_p", "all"],
)
def test_the_distribution_is_the_softmax_of_what_is_kept(settings_: SamplingParams) -> None:
    logits = random_logits(1, 40)
    expected = (logits[0].double() / settings_.temperature).softmax(0)
    order = expected.argsort(descending=True)
    if settings_.top_k:
        expected[order[settings_.top_k :]] = 0
        expected /= expected.sum()
    if settings_.top_p < 1:
        before = expected[order].cumsum(0) - expected[order]
        expected[order[before >= settings_.top_p]] = 0
        expected /= expected.sum()
    draws = 20_000
    counts = Counter(sample(logits.expand(draws, -1), [settings_] * draws, range(draws)))
    assert all(expected[token] > 0 for token in counts)
    statistic, bins = 0.0, 0
    rare_expected = rare_count = 0.0
    for token, probability in enumerate(expected.tolist()):
        if probability * draws < 5:
            rare_expected += probability * draws
            rare_count += counts[token]
        else:
            statistic += (counts[token] - probability * draws) ** 2 / (probability * draws)
            bins += 1
    if rare_expected > 5:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        bins += 1
    degrees = bins - 1
    assert degrees >= 3
    # Wilson and Hilferty: chi-square's quantile at p = 0.001.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (statistic, limit)


row_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 400, VOCAB, VOCAB + 1, 10**9]),
    top_p=st.sampled_from([1e-9, 0.3, 0.999, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(row_params, st.integers(0, 10**6)), min_size=1, max_size=9))
def test_a_row_does_not_depend_on_its_mates(rows: list[tuple[SamplingParams, int]]) -> None:
    logits = random_logits(len(rows))
    settings_, positions = [row for row, _ in rows], [position for _, position in rows]
    together = sample(logits, settings_, positions)
    alone = [
        sample(logits[i : i + 1], settings_[i : i + 1], positions[i : i + 1])[0] for i in range(len(rows))
    ]
    assert together == alone
    assert sample(logits, settings_, positions) == together
    for row, (one, _) in enumerate(rows):
        if one.temperature == 0 or one.top_k == 1 or one.top_p < 1e-6:
            assert together[row] == int(logits[row].argmax())
        if 0 < one.top_k < VOCAB:
            assert together[row] in logits[row].topk(one.top_k).indices.tolist()


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(200, VOCAB)
    by_position = sample(logits, [params(seed=1)] * 200, range(200))
    by_seed = sample(logits, [params(seed=seed) for seed in range(200)], [0] * 200)
    assert len(set(by_position)) > 150
    assert len(set(by_seed)) > 150


def test_a_flat_distribution_needs_the_whole_vocabulary_for_its_nucleus() -> None:
    drawn = sample(torch.zeros(2000, VOCAB), [params(top_p=0.95)] * 2000, range(2000))
    assert len(set(drawn)) > 800


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((300, VOCAB), -torch.inf)
    logits[:, [3, 600, VOCAB - 1]] = 0.0
    for settings_ in (params(), params(top_p=0.99), params(top_k=5), params(temperature=9.0)):
        assert set(sample(logits, [settings_] * 300, range(300))) == {3, 600, VOCAB - 1}


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(20)
    assert sample(logits, [params(temperature=temperature)] * 20, range(20)) == logits.argmax(1).tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(torch.zeros(1, VOCAB), [params(temperature=0)], [0]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_naming_the_row(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 700] = bad
    with pytest.raises(RuntimeError, match=r"not finite in rows \[1\]"):
        sample(logits, [params(temperature=temperature)] * 3, [0, 1, 2])


def test_a_row_with_everything_excluded_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"rows \[0\]"):
        sample(torch.full((1, VOCAB), -torch.inf), [params()], [0])


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), [], []) == []


@pytest.mark.parametrize(
    "odd",
    [
        params(temperature=-0.1),
        params(temperature=math.nan),
        params(top_k=1, top_p=math.nan),
        params(top_p=0.0),
        params(top_p=-1.0),
    ],
)
def test_a_value_out_of_range_spoils_no_step(odd: SamplingParams) -> None:
    logits = random_logits(2)
    tokens = sample(logits, [odd, params(seed=4)], [0, 0])
    assert tokens == [int(logits[0].argmax()), *sample(logits[1:], [params(seed=4)], [0])]
