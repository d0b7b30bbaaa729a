import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.logit_edits import add_bias, apply_bitmask, apply_penalties
from kernels.logit_edits_ref import add_bias_ref, apply_bitmask_ref, apply_penalties_ref


def random_logits(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 5


def tensors(*arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def test_biases_are_added_and_the_same_token_twice_gets_both() -> None:
    logits = random_logits(3, 50)
    arguments = np.array([0, 2, 2]), np.array([4, 7, 7]), np.array([1.5, -100.0, 0.5])
    expected = add_bias_ref(logits, *tensors(*arguments))
    add_bias(logits, *arguments)
    assert torch.equal(logits, expected)


def test_penalties_equal_their_reference_and_leave_other_rows_alone() -> None:
    logits = random_logits(4, 1000)
    before = logits.clone()
    generator = np.random.default_rng(3)
    offsets = np.array([0, 5, 5, 300])
    token_ids = np.concatenate([generator.permutation(1000)[:5], generator.permutation(1000)[:295]]).astype(
        np.int32
    )
    counts = generator.integers(0, 4, 300).astype(np.int32)
    arguments = (
        np.array([3, 0, 1]),
        offsets,
        token_ids,
        counts,
        np.array([1.3, 5.0, 0.5]),
        np.array([0.7, 1.0, -0.4]),
        np.array([0.2, 1.0, 1.9]),
    )
    expected = apply_penalties_ref(logits, *tensors(*arguments))
    apply_penalties(logits, *arguments)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[3], before[3])


def test_what_only_the_prompt_holds_is_repeated_but_not_frequent_or_present() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    apply_penalties(
        logits,
        np.array([0]),
        np.array([0, 4]),
        np.array([0, 1, 2, 3], np.int32),
        np.array([0, 0, 3, 1], np.int32),
        np.array([2.0]),
        np.array([0.25]),
        np.array([1.0]),
    )
    assert logits.tolist() == [[1.0, -4.0, 1.0 - 0.75 - 1.0, -4.0 - 0.25 - 1.0]]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000])
def test_a_bitmask_equals_its_reference(size: int) -> None:
    logits = random_logits(5, size)
    rows = np.array([4, 0, 2])
    words = -(-size // 32)
    bitmask = np.random.default_rng(size).integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    bitmask[1] = -1
    expected = apply_bitmask_ref(logits, *tensors(rows, bitmask))
    apply_bitmask(logits, rows, bitmask)
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits[[0, 1, 3]]).all()


def test_a_bitmask_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="a bitmask of 1 words for 33 tokens"):
        apply_bitmask(random_logits(1, 33), np.array([0]), np.zeros((1, 1), np.int32))


@pytest.mark.parametrize("token_id", [-1, 50])
def test_a_token_beyond_the_vocabulary_is_refused_and_nothing_is_written_past_the_row(token_id: int) -> None:
    logits = random_logits(3, 50)
    before = logits.clone()
    row, one = np.array([1]), np.array([1.0])
    with pytest.raises(IndexError, match="vocabulary"):
        add_bias(logits, row, np.array([token_id]), one)
    ids = np.array([token_id], np.int32)
    with pytest.raises(IndexError, match="vocabulary"):
        apply_penalties(logits, row, np.array([0, 1]), ids, np.array([1], np.int32), one, one, one)
    assert torch.equal(logits, before)
