import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.logit_rows import CHUNK
from kernels.rescore_logits import MARGIN, MAX_CANDIDATES, NUM_MARGINS, TABLE_BLOCK, rescore_logits
from kernels.rescore_logits_ref import rescore_logits_ref
from kernels.rms_norm_ref import rms_norm_ref

EPSILON = 1e-6
# What was computed anew agrees so far; all else bit for bit.
ABSOLUTE = 2e-5


class Head:
    """A random final norm, output matrix and hidden states, and the logits that they give in fp64."""

    def __init__(self, num_rows: int, vocab_size: int, dim: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = vocab_size, dim // TABLE_BLOCK
        self.hidden = torch.randn(num_rows, dim, generator=generator) * 3
        self.norm_weight = torch.randn(dim, generator=generator)
        shape = (*blocks, TABLE_BLOCK)
        self.values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        self.scales = torch.rand(*blocks, 1, generator=generator) / 127
        table = (self.values.double() * self.scales.double()).flatten(1)
        normed = rms_norm_ref(self.hidden.double(), self.norm_weight.double(), EPSILON)
        self.exact = normed @ table.T

    def rescore(self, logits: Tensor) -> Tensor:
        result = logits.clone()
        rescore_logits(result, self.hidden, self.norm_weight, EPSILON, self.values, self.scales)
        return result

    def reference(self, logits: Tensor) -> Tensor:
        result = logits.clone()
        rescore_logits_ref(result, self.hidden, self.norm_weight, EPSILON, self.values, self.scales)
        return result


def assert_agree(head: Head, logits: Tensor) -> Tensor:
    """Returns which logits were computed anew."""
    actual, expected = head.rescore(logits), head.reference(logits)
    changed = expected != logits
    assert torch.equal(actual[~changed].view(torch.int32), logits[~changed].view(torch.int32))
    error = (actual[changed] - head.exact[changed]).abs()
    if error.numel():
        print(f"{error.numel()} computed anew, max error {error.max():.1e}")
        assert error.max() < ABSOLUTE
    return changed


@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("vocab_size", [3, CHUNK, CHUNK + 1, 40_000])
@pytest.mark.parametrize("dim", [32, 640])
def test_it_equals_its_reference(num_rows: int, vocab_size: int, dim: int) -> None:
    head = Head(num_rows, vocab_size, dim)
    noise = torch.randn(head.exact.shape, generator=torch.Generator().manual_seed(1)) * 0.06
    assert assert_agree(head, head.exact.float() + noise).any(dim=1).all()


def test_no_rows_are_no_work() -> None:
    assert Head(0, 1000).rescore(torch.empty(0, 1000)).shape == (0, 1000)


def test_only_what_is_within_the_margin_changes() -> None:
    """At both ends of chunks, of what one thread claims, and of rows."""
    places = [0, 63, 64, CHUNK - 1, CHUNK, 32 * CHUNK - 1, 32 * CHUNK, 20_000, 39_999]
    head = Head(3, 40_000)
    logits = torch.full((3, 40_000), -5.0)
    for row in range(3):
        logits[row, places] = -3.0 + 2 * torch.rand(len(places), generator=torch.Generator().manual_seed(row))
        logits[row, places[row]] = -1.0
        # Just beyond.
        logits[row, [1, 62, 65, CHUNK + 1, 39_998]] = np.nextafter(np.float32(-3.0), np.float32(-4.0)).item()
    expected = torch.zeros(3, 40_000, dtype=torch.bool)
    expected[:, places] = True
    assert torch.equal(assert_agree(head, logits), expected)
    # What lies at the very margin is within.
    logits[:, 100] = -3.0
    expected[:, 100] = True
    assert torch.equal(assert_agree(head, logits), expected)


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-30, 3e38])
def test_equal_logits_are_all_computed_anew(largest: float) -> None:
    head = Head(2, 5000)
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, 7 : 7 + MAX_CANDIDATES] = largest
    changed = assert_agree(head, logits)
    assert changed.sum().item() == 2 * MAX_CANDIDATES


def test_the_margin_narrows_until_few_enough_are_within() -> None:
    head = Head(1, 40_000)
    logits = torch.full((1, 40_000), -50.0)
    spread = torch.randperm(40_000, generator=torch.Generator().manual_seed(0))
    # One more than allowed within the half of the margin, as many as allowed within its quarter.
    logits[0, spread[:MAX_CANDIDATES]] = 9.75
    logits[0, spread[MAX_CANDIDATES]] = 9.25
    logits[0, spread[0]] = 10.0
    changed = assert_agree(head, logits)
    assert changed[0].nonzero().flatten().tolist() == sorted(spread[:MAX_CANDIDATES].tolist())


@pytest.mark.parametrize("spread", [0.0, 0.9, 1.1, 3.0])
def test_a_row_that_is_too_flat_stays_as_it_is(spread: float) -> None:
    """In units of the last margin."""
    last = MARGIN / 2 ** (NUM_MARGINS - 1)
    logits = torch.linspace(4 - spread * last, 4, MAX_CANDIDATES + 1).repeat(2, 1)
    changed = assert_agree(Head(2, MAX_CANDIDATES + 1), logits)
    assert changed.any().item() is (spread > 1)


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 900, 4999])
def test_what_is_not_finite_stays(number: float, place: int) -> None:
    head = Head(3, 5000)
    logits = head.exact.float()
    logits[1, place] = number
    actual = head.rescore(logits)
    assert torch.equal(actual[1, place].view(torch.int32), logits[1, place].view(torch.int32))
    assert actual[1].isfinite().logical_not().sum() == 1
    # The other rows are as they would be without it.
    assert torch.equal(actual[[0, 2]], head.rescore(head.exact.float())[[0, 2]])
    only = torch.full((3, 5000), number)
    assert torch.equal(head.rescore(only).view(torch.int32), only.view(torch.int32))


def test_a_hidden_state_that_is_not_finite_shows() -> None:
    head = Head(1, 5000)
    head.hidden[0, 3] = torch.nan
    assert head.rescore(head.exact.float()).isnan().any()


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    head = Head(9, 40_000)
    together = head.rescore(head.exact.float())
    for row in range(9):
        alone = head.exact[row : row + 1].float()
        rescore_logits(alone, head.hidden[row : row + 1], head.norm_weight, EPSILON, head.values, head.scales)
        assert torch.equal(alone[0], together[row])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(1, 3000),
    num_rows=st.integers(1, 4),
    noise=st.floats(0, MARGIN / 2 - 1e-3),
    scale=st.floats(0.01, 1.0),
)
def test_the_most_likely_token_is_the_exact_one(
    seed: int, vocab_size: int, num_rows: int, noise: float, scale: float
) -> None:
    """Whatever the noise, below half of the margin, as long as no more than the bound are near."""
    head = Head(num_rows, vocab_size, seed=seed)
    # The worst there is: all logits are off by as much as may be, up or down.
    signs = torch.randint(0, 2, head.exact.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    signs *= torch.rand(head.exact.shape, generator=torch.Generator().manual_seed(seed)) < scale
    logits = (head.exact + noise * signs).float()
    near = (logits >= logits.amax(1, keepdim=True) - MARGIN).sum(1) <= MAX_CANDIDATES
    chosen = head.rescore(logits).argmax(1)
    given_up = head.exact.amax(1) - head.exact.gather(1, chosen[:, None])[:, 0]
    assert (given_up[near] < ABSOLUTE).all()
