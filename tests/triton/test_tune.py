"""What tuning chooses: the fastest of the candidates that compute what the default does."""

from dataclasses import replace

import pytest
import torch

from kernels import fp8_matmul, paged_attention
from kernels.launch import FP8, Launch
from kernels.tune import Problem, Tiling, attention_candidates, matmul_candidates, measure
from kernels.tuned import Measured


def problem(device: torch.device, broken: Tiling | None = None) -> Problem:
    """A product of fp32 and FP8; the tiling `broken` multiplies with other scales."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 64, generator=generator).to(device)
    values = torch.randn(48, 64, generator=generator).to(FP8).to(device)
    scales = torch.rand(48, 1, generator=generator).to(device) + 0.5
    output = torch.empty(4, 48, device=device)
    default = fp8_matmul.tiling(4, 64, 64, 4)

    def launches(cut: Tiling) -> list[Launch]:
        assert isinstance(cut, fp8_matmul.Tiling)
        used = scales * 2 if cut == broken else scales
        return [fp8_matmul.launch(output, x, values, used, 64, cut)]

    candidates: list[Tiling] = [default, replace(default, block_n=16), replace(default, block_k=16)]
    return Problem("fp8_matmul", {"num_rows": 4}, default, candidates, output, launches)


@pytest.mark.parametrize(("broken", "chosen"), [(None, 2), (2, 1), (1, 2)])
def test_the_fastest_that_is_right_is_chosen(device: torch.device, broken: int | None, chosen: int) -> None:
    candidates = problem(device).candidates
    seconds = iter([3e-6, 2e-6, 1e-6] if broken is None else [3e-6, 2e-6])
    posed = problem(device, None if broken is None else candidates[broken])
    measured = measure(posed, lambda compute: next(seconds))
    expected = candidates[chosen]
    assert isinstance(expected, fp8_matmul.Tiling)
    constants = {name: getattr(expected, name) for name in fp8_matmul.Tiling.__dataclass_fields__}
    assert measured == Measured("fp8_matmul", {"num_rows": 4}, constants, 1.0 if broken is None else 2.0, 3.0)
    assert fp8_matmul.Tiling(**measured.constants) == expected


def test_a_default_that_is_fastest_stays(device: torch.device) -> None:
    posed = problem(device)
    seconds = iter([1e-6, 2e-6, 3e-6])
    measured = measure(posed, lambda compute: next(seconds))
    assert fp8_matmul.Tiling(**measured.constants) == posed.default
    assert measured.us == measured.default_us == 1.0


def test_candidates_are_the_default_and_others() -> None:
    attention = paged_attention.tiling(128, 4, 2, decode=True)
    product = fp8_matmul.tiling(64, 4096, 128, 2)
    for default, found in (
        (attention, attention_candidates(attention)),
        (product, matmul_candidates(product, 128)),
    ):
        assert found[0] == default
        assert len(set(found)) == len(found) > 20
