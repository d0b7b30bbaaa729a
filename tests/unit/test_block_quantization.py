"""int8 blocks: exact where the weights were stored in steps, near where they were not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from workers.models.block_quantization import quantize_blocks


@pytest.mark.parametrize(
    ("lowest", "highest"), [(-127, 127), (-16, 15), (-8, 7)], ids=["Q8_0", "Q5_0", "Q4_0"]
)
def test_steps_of_a_file_are_found_again(lowest: int, highest: int) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(lowest, highest + 1, (64, 5, 32), generator=generator)
    steps[:, :, 0] = lowest
    scales = (torch.rand(64, 5, 1, generator=generator) * 0.01 + 2e-4).to(torch.float16)
    weights = (steps * scales.float()).flatten(1)
    values, found = quantize_blocks(weights)
    assert torch.equal((values * found.float()).flatten(1), weights)


def test_blocks_of_zeros_stay_zeros() -> None:
    values, scales = quantize_blocks(torch.zeros(2, 64))
    assert not values.any()
    assert not scales.any()


@given(arrays(np.float32, (3, 64), elements=st.floats(-100, 100, width=32)))
def test_the_error_is_at_most_half_a_step_of_127(
    weights: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
) -> None:
    rows = torch.from_numpy(weights)
    values, scales = quantize_blocks(rows)
    errors = ((values * scales.float()).flatten(1) - rows).view(3, 2, 32)
    largest = rows.view(3, 2, 32).abs().amax(2)
    # Scales are fp16: one that is rounded down leaves the largest value a little short.
    bound = largest / 254 * 1.01 + largest * 2**-10 + 127 * 2**-24
    assert (errors.square().sum(2).sqrt() <= bound * 32**0.5).all()


def test_rows_that_are_no_multiple_of_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 48 values: no multiple of 32"):
        quantize_blocks(torch.zeros(2, 48))
