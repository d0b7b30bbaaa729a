"""Drawn tokens against those of the reference, which sorts: the same numbers give the same tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.sampling import BROKEN
from kernels.sampling_ref import kept_ref, sample_rows_ref
from kernels.top_k_top_p_sampling import sample_rows
from kernels.uniform_ref import uniform_ref
from tests.drawn_tokens import assert_drawn_from, distribution

VOCAB_SIZE = 5000  # more than a block


def draw(device: torch.device, logits: Tensor, *filters: list[float], uniform: list[float]) -> list[int]:
    temperature, top_k, top_p, min_p = filters
    columns = (
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k, dtype=torch.int64),
        *(torch.tensor(each, dtype=torch.float64) for each in (top_p, min_p, uniform)),
    )
    tokens: list[int] = sample_rows(logits.to(device), *(each.to(device) for each in columns)).tolist()
    assert tokens == sample_rows_ref(logits, *columns).tolist()
    for token, kept in zip(tokens, kept_ref(logits, *columns[:4]), strict=True):
        assert token == BROKEN or kept[token]
    return tokens


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3


# (temperature, top_k, top_p, min_p, uniform)
ROWS = {
    "no filter": (0.7, 0, 1.0, 0.0, 0.93),
    "the first token": (1.3, 0, 1.0, 0.0, 1e-12),
    "the last token": (1.3, 0, 1.0, 0.0, 1 - 1e-12),
    "top-k": (2.0, 7, 1.0, 0.0, 0.5),
    "top-k of one": (1.0, 1, 1.0, 0.0, 0.9),
    "top-k of more than there are": (1.0, 10_000, 1.0, 0.0, 0.6),
    "top-p": (1.0, 0, 0.7, 0.0, 0.9),
    "top-p of nothing": (1.0, 0, 0.0, 0.0, 0.9),
    "min-p": (1.0, 0, 1.0, 0.05, 0.8),
    "all": (1.5, 50, 0.9, 0.01, 0.7),
    "cold": (0.05, 50, 0.9, 0.0, 0.99),
}


def test_draws_what_the_reference_draws(device: torch.device) -> None:
    columns = [list(column) for column in zip(*ROWS.values(), strict=True)]
    draw(device, random_logits(len(ROWS)), *columns[:4], uniform=columns[4])


@pytest.mark.parametrize(
    ("filters", "few_draws"),
    [({}, 100), ({"temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.02}, 40)],
    ids=["softmax", "all"],
)
def test_the_distribution_is_the_softmax_of_what_is_kept(
    device: torch.device, filters: dict[str, Any], few_draws: int
) -> None:
    """A row is a request, alike but for its seed. `few_draws` are in the interpreter, where a row takes up to
    half a second; `tests/unit/test_kernels_sampling.py` draws more, from the reference."""
    draws = 20_000 if device.type == "cuda" else few_draws
    logits = random_logits(1, 8) * 0.2
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    temperature, top_p, min_p = (
        torch.full((draws,), values[name], dtype=torch.float64, device=device)
        for name in ("temperature", "top_p", "min_p")
    )
    top_k = torch.full((draws,), values["top_k"], dtype=torch.int64, device=device)
    uniform = torch.tensor([uniform_ref(seed, 0) for seed in range(draws)], dtype=torch.float64).to(device)
    rows = logits.expand(draws, -1).contiguous().to(device)
    tokens = sample_rows(rows, temperature, top_k, top_p, min_p, uniform).tolist()
    assert_drawn_from(distribution(logits[0], **filters), tokens)


def test_of_equals_the_lower_ids_are_kept(device: torch.device) -> None:
    logits = torch.zeros(5, 70)
    logits[:, 60:] = 1.0
    logits[2:, 69] = 2.0
    # Each filter ends among equals, or right before them; each draw lies where one more or fewer would show.
    top_k: list[float] = [12, 12, 12, 0, 12]
    top_p = [1.0, 1.0, 0.9, 0.36, 0.4]
    uniform = [0.06, 1 - 1e-9, 1e-9, 0.05, 0.5]
    tokens = draw(device, logits, [1.0] * 5, top_k, top_p, [0.0] * 5, uniform=uniform)
    assert tokens == [1, 69, 60, 1, 62]


def test_greedy_takes_the_lowest_id_among_equals(device: torch.device) -> None:
    logits = random_logits(3)
    logits[0, [4999, 4200, 77]] = 50.0
    logits[1, [4999, 4200]] = 50.0
    logits[2] = -0.0
    logits[2, 4097] = 0.0
    tokens = draw(device, logits, [0.0, 1e-6, 0.0], [0] * 3, [1.0] * 3, [0.0] * 3, uniform=[0.5] * 3)
    assert tokens == [77, 4200, 0]


def test_excluded_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((3, VOCAB_SIZE), -torch.inf)
    logits[:, [5, 4500]] = torch.tensor([1.0, 2.0])
    tokens = draw(
        device, logits, [1.0] * 3, [0, 3, 0], [1.0, 1.0, 0.99], [0.0] * 3, uniform=[1e-9, 1 - 1e-9, 0.5]
    )
    assert set(tokens) == {5, 4500}


def test_a_broken_row_is_said_to_be_and_leaves_others_alone(device: torch.device) -> None:
    logits = random_logits(5)
    for row, broken in enumerate((torch.nan, -torch.nan, torch.inf)):
        logits[row, 4321] = broken
    logits[3] = -torch.inf
    for temperature in (0.0, 1.0):
        tokens = draw(device, logits, [temperature] * 5, [0] * 5, [1.0] * 5, [0.0] * 5, uniform=[0.5] * 5)
        assert tokens[:4] == [BROKEN] * 4
        assert tokens[4] != BROKEN
