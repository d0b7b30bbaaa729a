"""Tokens from logits on a device, over the plain operations: those of the CPU's sampler, row by row."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dispatch import PLAIN
from schemas.records import LogitBias
from tests.engine_factories import make_request
from workers.device_sampler import DeviceSampler
from workers.request import Request
from workers.sampler import Sampler

VOCAB_SIZE = 300
END = 1
SAMPLER, DEVICE_SAMPLER = Sampler({END}), DeviceSampler(PLAIN, {END})


class Allowing:
    """A `TokenConstraint` that allows one token."""

    error = ""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = 0
        row.view(np.uint32)[self._token_id // 32] = 1 << (self._token_id % 32)

    def advance(self, token_id: int) -> None:
        pass


def request(number: int = 1, position: int = 2, **sampling: Any) -> Request:
    return make_request(number, max_tokens=99, output_token_ids=[3, 60][:position], **sampling)


def constrained(number: int) -> Request:
    made = request(number, temperature=1.0)
    made.constraint = Allowing(number % VOCAB_SIZE)
    return made


KINDS: list[Any] = [
    lambda number: request(number, temperature=0.0),
    lambda number: request(number, temperature=0.8, seed=number),
    lambda number: request(number, temperature=1.5, top_k=9, top_p=0.8, min_p=0.02, seed=number),
    lambda number: request(number, temperature=1.0, seed=number, logprobs=3),
    lambda number: request(number, temperature=0.0, logit_bias=[LogitBias(token_id=5, bias=50.0)]),
    lambda number: request(number, temperature=0.7, seed=number, min_tokens=9, stop_token_ids=[4]),
    lambda number: request(number, temperature=0.7, seed=number, frequency_penalty=1.5),
    lambda number: request(number, temperature=0.7, seed=number, presence_penalty=-1.5),
    lambda number: request(number, temperature=0.7, seed=number, repetition_penalty=2.0),
    constrained,
]


def random_logits(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@given(st.lists(st.integers(0, len(KINDS) - 1), max_size=9), st.integers(0, 99))
@settings(max_examples=60)
def test_all_that_the_cpu_can_is_done_for_a_device(kinds: list[int], seed: int) -> None:
    requests = [KINDS[kind](seed + row) for row, kind in enumerate(kinds)]
    logits = random_logits(len(requests), seed)
    kept = logits.clone()
    actual = DEVICE_SAMPLER.sample(logits, requests)
    assert torch.equal(logits, kept), "what lies on the device stays as it is"
    assert actual == SAMPLER.sample(logits.clone(), requests)


def test_the_same_batch_goes_on_at_its_next_position() -> None:
    requests = [request(number, temperature=1.0, seed=number) for number in range(4)]
    for seed in range(5):
        logits = random_logits(4, seed)
        expected = SAMPLER.sample(logits.clone(), requests).token_ids
        drawn = DEVICE_SAMPLER.sample(logits, requests).token_ids
        assert drawn == expected
        for each, token_id in zip(requests, drawn, strict=True):
            each.output_token_ids.append(token_id)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_broken_row_is_an_error(logprobs: int | None) -> None:
    """Wherever it is sampled."""
    requests = [request(1, temperature=1.0), request(2, temperature=1.0, logprobs=logprobs)]
    logits = random_logits(2, 1)
    logits[1, 7] = torch.nan
    with pytest.raises(RuntimeError, match="the model's output is broken"):
        DEVICE_SAMPLER.sample(logits, requests)
    with pytest.raises(ValueError, match="2 rows, 1 requests"):
        DEVICE_SAMPLER.sample(logits, requests[:1])
