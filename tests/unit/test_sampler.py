import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.sampling import LogitBias
from tests.drawn_tokens import assert_drawn_from, distribution
from tests.engine_factories import EOS, make_request
from workers.request import Request
from workers.sampler import Sampler

VOCAB = 1300  # no multiple of the kernels' chunk
SAMPLER = Sampler({EOS})


def request(number: int = 1, position: int = 0, **sampling: Any) -> Request:
    """A request with `position` output tokens."""
    return make_request(number, max_tokens=10**6, output_token_ids=[3] * position, **sampling)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 3) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: Tensor, requests: list[Request]) -> list[int]:
    """Tokens of a copy of the logits."""
    return SAMPLER.sample(logits.clone(), requests).token_ids


class Allowing:
    """A `TokenConstraint` that allows a fixed set of tokens."""

    error = ""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = 0
        words = row.view(np.uint32)
        for token_id in self._token_ids:
            words[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def advance(self, token_id: int) -> None:
        assert token_id in self._token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 8},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    ],
    ids=["softmax", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_the_distribution_is_the_softmax_of_what_is_kept(sampling: dict[str, Any]) -> None:
    logits = random_logits(1, 40)
    draws = 20_000
    requests = [request(seed=seed, **sampling) for seed in range(draws)]
    assert_drawn_from(distribution(logits[0], **sampling), sample(logits.expand(draws, -1), requests))


row_sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5, 400, VOCAB, VOCAB + 1, 10**9]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "min_tokens": st.sampled_from([0, 3]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(row_sampling, st.integers(0, 6)), min_size=1, max_size=9))
def test_a_row_does_not_depend_on_its_mates(rows: list[tuple[dict[str, Any], int]]) -> None:
    logits = random_logits(len(rows))
    requests = [request(i, position, **sampling) for i, (sampling, position) in enumerate(rows)]
    together = SAMPLER.sample(logits.clone(), requests)
    again = [request(i, position, **sampling) for i, (sampling, position) in enumerate(rows)]
    for row, one in enumerate(again):
        alone = SAMPLER.sample(logits[row : row + 1].clone(), [one])
        assert alone.token_ids == together.token_ids[row : row + 1]
        expected = together.logprobs[row] if together.logprobs else None
        assert (alone.logprobs or [None]) == [expected]
    assert SAMPLER.sample(logits.clone(), requests) == together


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(200, VOCAB)
    by_position = sample(logits, [request(position=position, seed=1) for position in range(200)])
    by_seed = sample(logits, [request(seed=seed) for seed in range(200)])
    assert len(set(by_position)) > 150
    assert len(set(by_seed)) > 150


def test_positions_are_read_anew_while_the_batch_stays() -> None:
    one = request(seed=4)
    drawn = []
    for _ in range(40):
        drawn += sample(torch.zeros(1, VOCAB), [one])
        one.output_token_ids.append(drawn[-1])
    assert drawn == [
        sample(torch.zeros(1, VOCAB), [request(position=position, seed=4)])[0] for position in range(40)
    ]


def test_a_flat_distribution_needs_the_whole_vocabulary_for_its_nucleus() -> None:
    drawn = sample(torch.zeros(2000, VOCAB), [request(seed=seed, top_p=0.95) for seed in range(2000)])
    assert len(set(drawn)) > 800


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((300, VOCAB), -torch.inf)
    logits[:, [3, 600, VOCAB - 1]] = 0.0
    for sampling in ({}, {"top_p": 0.99}, {"top_k": 5}, {"temperature": 9.0}):
        drawn = sample(logits, [request(seed=seed, **sampling) for seed in range(300)])
        assert set(drawn) == {3, 600, VOCAB - 1}


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(20)
    assert sample(logits, [request(temperature=temperature)] * 20) == logits.argmax(1).tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(torch.zeros(1, VOCAB), [request(temperature=0)]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_naming_the_row(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 700] = bad
    requests = [request(temperature=temperature, logprobs=2) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"not finite in rows \[1\]"):
        sample(logits, requests)


def test_a_row_with_everything_excluded_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"rows \[0\]"):
        sample(torch.full((1, VOCAB), -torch.inf), [request()])


def test_no_rows_give_no_tokens() -> None:
    assert SAMPLER.sample(torch.empty(0, VOCAB), []) == ([], [])


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": 1, "top_p": math.nan},
        {"top_p": 0.0},
        {"top_p": -1.0},
        {"min_p": 7.0},
    ],
)
def test_a_value_out_of_range_spoils_no_step(odd: dict[str, Any]) -> None:
    logits = random_logits(2)
    tokens = sample(logits, [request(**odd), request(seed=4)])
    assert tokens == [int(logits[0].argmax()), *sample(logits[1:], [request(seed=4)])]


def test_a_bias_forces_and_forbids() -> None:
    logits = random_logits(2)
    best = logits.argmax(1).tolist()
    forced = request(1, logit_bias=[LogitBias(77, 100.0)])
    forbidden = request(2, temperature=0, logit_bias=[LogitBias(best[1], -100.0)])
    assert sample(logits, [forced, forbidden]) == [77, int(logits[1].topk(2).indices[1])]


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 101]] = torch.tensor([3.0, 2.0])  # 101 is the prompt's only token

    def greedy(output: list[int], **sampling: Any) -> int:
        one = make_request(1, max_tokens=99, output_token_ids=output, temperature=0, **sampling)
        return sample(logits, [one])[0]

    assert greedy([5], presence_penalty=1.5) == 101
    assert greedy([5, 5], frequency_penalty=0.6) == 101
    assert greedy([5], frequency_penalty=0.6) == 5
    assert greedy([], presence_penalty=2.0, frequency_penalty=2.0) == 5
    # Repetition: 3 and 2 become 1.5 (in the output) and 1 (in the prompt); then the prompt's is the best.
    assert greedy([5], repetition_penalty=2.0) == 5
    logits[0, [5, 101]] = torch.tensor([2.0, 3.0])
    assert greedy([], presence_penalty=2.0) == 101
    assert greedy([], repetition_penalty=2.0) == 5


def test_counts_follow_the_output_token_by_token_and_are_rebuilt_by_a_resume() -> None:
    sampling: dict[str, Any] = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "seed": 9,
    }
    logits = random_logits(1, 140)

    def run(one: Request, length: int) -> list[int]:
        while len(one.output_token_ids) < length:
            one.output_token_ids += sample(logits, [one])
        return one.output_token_ids

    whole = run(request(**sampling), 60)
    assert len(set(whole)) > 5
    for position in (1, 17, 59):
        resumed = make_request(1, max_tokens=99, output_token_ids=whole[:position], **sampling)
        assert run(resumed, 60) == whole


def test_nothing_ends_a_request_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 50, 60]] = torch.tensor([9.0, 8.0, 7.0])

    def greedy(position: int, **sampling: Any) -> int:
        one = request(position=position, temperature=0, min_tokens=2, stop_token_ids=[50], **sampling)
        return sample(logits, [one])[0]

    assert [greedy(position) for position in range(4)] == [60, 60, EOS, EOS]
    # Who ignores the end tokens is not ended by them.
    assert greedy(0, ignore_eos=True) == EOS


def test_a_grammar_mask_holds_and_is_stronger_than_min_tokens() -> None:
    logits = random_logits(4)
    logits[:, EOS] = 50.0
    requests = [request(number, temperature=0, min_tokens=1) for number in range(4)]
    requests[0].constraint = Allowing(31, 32, 1299)
    requests[1].constraint = Allowing(EOS)
    requests[2].constraint = Allowing(EOS, 700)
    tokens = sample(logits, requests)
    assert tokens[0] in {31, 32, 1299}
    assert tokens[1] == EOS
    assert tokens[2] == 700
    logits[3, EOS] = -torch.inf
    assert tokens[3] == int(logits[3].argmax())


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(3)
    expected = logits.double().log_softmax(1)
    requests = [
        request(1, temperature=0, logprobs=2),
        request(2),
        request(3, seed=5, temperature=0.5, top_k=3, logprobs=0, logit_bias=[LogitBias(7, 100.0)]),
    ]
    sampled = SAMPLER.sample(logits.clone(), requests)
    first, second, third = sampled.logprobs
    assert second is None
    assert first is not None
    assert first.top_token_ids == expected[0].topk(2).indices.tolist()
    assert first.top_logprobs == pytest.approx(expected[0].topk(2).values.tolist(), abs=1e-5)
    assert first.logprob == pytest.approx(first.top_logprobs[0], abs=1e-12)
    assert third is not None
    assert sampled.token_ids[2] == 7
    assert third.logprob == pytest.approx(float(expected[2, 7]), abs=1e-5)
    assert third.top_token_ids == third.top_logprobs == []


def test_nobody_asks_for_logprobs_and_none_are_made() -> None:
    assert SAMPLER.sample(random_logits(2), [request(1), request(2)]).logprobs == []
