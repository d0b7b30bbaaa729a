import numpy as np
import pytest
import torch

from kernels.logit_rows import CHUNK
from kernels.token_logprobs import top_logprobs
from kernels.token_logprobs_ref import top_logprobs_ref


@pytest.mark.parametrize("size", [5, CHUNK, CHUNK + 1, 20_000])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("kind", ["plain", "ties", "excluded"])
def test_it_equals_its_reference(size: int, count: int, kind: str) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind == "excluded":
        logits[:, ::2] = -torch.inf
        count = min(count, size // 2)
    rows = np.array([3, 1])
    normalizers, token_ids, logprobs = top_logprobs(logits, rows, count)
    expected = top_logprobs_ref(logits, torch.from_numpy(rows), count)
    assert token_ids.tolist() == expected[1].tolist()
    error = np.abs(normalizers - expected[0].numpy()).max()
    print(f"max error {error:.1e}")
    assert error < 1e-5
    np.testing.assert_allclose(logprobs, expected[2].numpy(), atol=1e-5)


def test_equals_come_in_the_order_of_their_ids() -> None:
    _, token_ids, logprobs = top_logprobs(torch.zeros(1, 5000), np.array([0]), 20)
    assert token_ids.tolist() == [list(range(20))]
    np.testing.assert_allclose(logprobs, -np.log(5000), atol=1e-6)


def test_all_of_a_small_vocabulary_is_told() -> None:
    _, token_ids, logprobs = top_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), np.array([0]), 3)
    assert token_ids.tolist() == [[1, 2, 0]]
    assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-6)
