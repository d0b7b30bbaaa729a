"""A launch of a Triton kernel as a value: what runs on the GPU is what is compiled ahead of time.

Each operation makes its launches from tensors; tensors of device "meta" will do to compile them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

Argument = Tensor | int | float | None


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or Triton's interpreter where TRITON_INTERPRET=1 was set before."""
    return triton.jit(function)


@dataclass(frozen=True, slots=True)
class Launch:
    """`arguments` are by the kernel's names, in its order; None: there is none, as is known when it compiles.

    `constants` are compiled in, and so are num_warps (of a program) and num_stages (loads under way at once).
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Starts it on the current stream."""
        if all(self.grid):
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removeprefix("_").removesuffix("_kernel")


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def check_rows(name: str, x: Tensor) -> None:
    """Raises ValueError where a row of `x` is not contiguous: kernels step over rows only."""
    if x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, its stride is {x.stride(-1)}")


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest number of FP8's e4m3 form (Micikevicius et al. 2022): what is larger is stored as this."""
