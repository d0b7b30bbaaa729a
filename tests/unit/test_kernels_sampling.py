"""Sampling rows against the reference: sizes beside the chunk, ties, excluded tokens, broken rows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.logit_rows import CHUNK, weight_of
from kernels.sampling import BROKEN, sample_rows
from kernels.sampling_ref import kept_ref, probabilities_ref, sample_rows_ref
from kernels.uniform_ref import uniform_ref
from tests.drawn_tokens import assert_drawn_from, distribution

SIZES = [1, 3, 40, CHUNK - 1, CHUNK, CHUNK + 1, 1300, 5000]


def random_logits(rows: int, size: int, seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(rows, size)
    elif kind == "excluded":
        logits[torch.rand(rows, size, generator=generator) < 0.5] = -torch.inf
        logits[:, size // 2] = 1.0
    elif kind == "steep":
        logits *= 20
    return logits


def columns(rows: list[tuple[float, int, float, float, float]]) -> list[np.ndarray]:
    temperature, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    return [
        np.array(temperature, np.float64),
        np.array(top_k, np.int64),
        np.array(top_p, np.float64),
        np.array(min_p, np.float64),
        np.array(uniform, np.float64),
    ]


row_params = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0, 9.0, 50.0]),
    st.sampled_from([0, 1, 2, 5, 40, 300, 700, 1100, 10**9]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
    st.floats(1e-9, 1 - 1e-9),
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(row_params, min_size=1, max_size=5),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["plain", "ties", "flat", "excluded", "steep"]),
)
def test_it_equals_its_reference_up_to_rounding(
    rows: list[tuple[float, int, float, float, float]], size: int, seed: int, kind: str
) -> None:
    logits = random_logits(len(rows), size, seed, kind)
    temperature, top_k, top_p, min_p, uniform = columns(rows)
    tokens = sample_rows(logits, temperature, top_k, top_p, min_p, uniform)

    def kept(shift: float) -> list[Tensor]:
        """With cuts that lie a little above or below where the parameters put them."""
        shifted = np.where(top_p < 1, top_p * (1 + shift), 1.0), min_p * (1 - shift)
        parameters = temperature, top_k, *shifted
        return kept_ref(logits, *(torch.from_numpy(each) for each in parameters))

    for row, (token, narrow, wide) in enumerate(zip(tokens, kept(-1e-5), kept(1e-5), strict=True)):
        assert wide[token]
        if torch.equal(narrow, wide):
            # The draw lies in the token's own stretch of the cumulative distribution.
            probabilities = probabilities_ref(logits[row], max(temperature[row], 1e-3)) * wide
            cumulative = (probabilities.cumsum(0) / probabilities.sum()).tolist()
            start = cumulative[token - 1] if token else 0.0
            assert start - 1e-5 <= uniform[row] <= cumulative[token] + 1e-5


@pytest.mark.parametrize("kind", ["plain", "excluded", "steep"])
@pytest.mark.parametrize("size", [CHUNK + 1, 5000, 20_000])
def test_away_from_rounding_it_draws_the_reference_tokens(size: int, kind: str) -> None:
    rows = [
        (temperature, top_k, top_p, min_p, (0.5 + i) / 48)
        for i, (temperature, top_k, top_p, min_p) in enumerate(
            [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 700, 0.95, 0.02)] * 12
        )
    ]
    logits = random_logits(len(rows), size, 7, kind)
    parameters = columns(rows)
    tokens = sample_rows(logits, *parameters)
    expected = sample_rows_ref(logits, *(torch.from_numpy(each) for each in parameters)).numpy()
    assert (tokens != expected).sum() <= 1


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 1.5, "top_k": 20, "top_p": 0.7}],
    ids=str,
)
def test_the_reference_draws_from_the_softmax_of_what_is_kept(filters: dict[str, Any]) -> None:
    draws = 4_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    columns = [
        torch.full((draws,), values[name], dtype=torch.int64 if name == "top_k" else torch.float64)
        for name in ("temperature", "top_k", "top_p", "min_p")
    ]
    columns.append(torch.tensor([uniform_ref(seed, 0) for seed in range(draws)], dtype=torch.float64))
    tokens = sample_rows_ref(logits.expand(draws, -1), *columns).tolist()
    assert_drawn_from(distribution(logits[0], **filters), tokens)


def test_a_weight_is_exp_to_the_last_bits_of_fp32() -> None:
    exponents = np.linspace(-87, 0, 20_001, dtype=np.float32)
    weights = np.array([weight_of(x, np.float32(0), np.float32(1)) for x in exponents])
    relative = np.abs(weights / np.exp(exponents.astype(np.float64)) - 1)
    print(f"max relative error {relative.max():.2e}")
    assert relative.max() < 4e-7
    assert weight_of(np.float32(-88), np.float32(0), np.float32(1)) == 0
    assert weight_of(np.float32(-math.inf), np.float32(0), np.float32(1)) == 0


def test_a_row_gives_the_same_token_alone_and_in_any_batch_whatever_the_threads() -> None:
    rows = [(1.0, 0, top_p, 0.0, u) for top_p in (1.0, 0.95) for u in np.linspace(0.001, 0.999, 40).tolist()]
    logits = random_logits(1, 30_000, 3, "plain").expand(len(rows), -1).contiguous()
    together = sample_rows(logits, *columns(rows))
    alone = [int(sample_rows(logits[:1], *columns([row]))[0]) for row in rows]
    assert together.tolist() == alone
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert sample_rows(logits, *columns(rows)).tolist() == alone
    finally:
        torch.set_num_threads(threads)


def test_a_temperature_without_bounds_makes_all_tokens_alike_but_excluded_ones() -> None:
    logits = torch.tensor([[5.0, -torch.inf, -5.0, 0.0]])
    drawn = [
        int(sample_rows(logits, *columns([(1e300, 0, 1.0, 0.0, u)]))[0])
        for u in (0.1, 0.3, 0.4, 0.6, 0.7, 0.9)
    ]
    assert drawn == [0, 0, 2, 2, 3, 3]


def test_minus_zero_and_zero_are_equals() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert sample_rows(logits, *columns([(0.0, 0, 1.0, 0.0, 0.5)])).tolist() == [1]
    drawn = {int(sample_rows(logits, *columns([(1.0, 2, 1.0, 0.0, u)]))[0]) for u in (0.1, 0.4, 0.6, 0.9)}
    assert drawn == {1, 2}


@pytest.mark.parametrize("size", [7, CHUNK + 3])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_broken_row_is_told_and_harms_no_other(size: int, bad: float) -> None:
    logits = random_logits(3, size, 1, "plain")
    logits[1, size // 2] = bad
    logits[2] = -torch.inf
    for params in ((0.0, 0, 1.0, 0.0, 0.5), (1.0, 5, 0.9, 0.1, 0.5)):
        tokens = sample_rows(logits, *columns([params] * 3))
        assert tokens[1:].tolist() == [BROKEN, BROKEN]
        assert 0 <= tokens[0] < size


def test_rows_beyond_two_gigabytes_are_addressed() -> None:
    """Index overflow: the last row starts past 2³¹ bytes. The memory is never touched but there."""
    rows, size = 2**31 // (4 * 262_144) + 2, 262_144
    logits = torch.empty(rows, size)
    last = logits[-1:]
    last.zero_()
    last[0, 200_000] = 5.0
    from kernels.token_logprobs import top_logprobs

    _, token_ids, _ = top_logprobs(logits, np.array([rows - 1]), 1)
    assert token_ids.tolist() == [[200_000]]
