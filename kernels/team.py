"""Runs a compiled kernel on torch's own OpenMP threads, or on the calling thread alone.

A second pool of threads beside torch's would fight it for the cores: each spins while the other works. So
kernels are handed to the `GOMP_parallel` of the library that torch has loaded. Rows are claimed piece by
piece, not cut in advance: on a shared machine a thread that lost its core must not hold half of the work.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numba import cfunc, types

from kernels.native import FAST_MATH, call_range, claim, int64s

# Work that a thread alone has done in this many ns is not worth waking another for: 3 µs where the threads
# still spin, 150 µs where they sleep (Xeon, 2 virtual cores).
_WORTH_WAKING_NS = 20_000

# Before a kernel's arguments: the next row to claim, the end, rows of one claim, the kernel's code.
_FIRST_ARGUMENT = 4


class _Code:
    """A function of int64s that is compiled when it is first asked for (or taken from the cache on disk)."""

    def __init__(self, function: Callable[..., None], num_arguments: int) -> None:
        self._function = function
        self._num_arguments = num_arguments
        self._compiled: Any = None  # owns the code

    @cached_property
    def address(self) -> int:
        signature = types.void(*[types.int64] * self._num_arguments)
        decorate: Any = cfunc(signature, cache=True, fastmath=FAST_MATH, error_model="numpy")
        self._compiled = decorate(self._function)
        return int(self._compiled.address)

    @cached_property
    def call(self) -> Any:
        """The GIL is not held in it."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._num_arguments)(self.address)


def _claim_ranges(address: int) -> None:
    words = int64s(address, _FIRST_ARGUMENT)
    start = claim(address, words[2])
    while start < words[1]:
        end = min(start + words[2], words[1])
        call_range(words[3], start, end, address + 8 * _FIRST_ARGUMENT)
        start = claim(address, words[2])


_claiming = _Code(_claim_ranges, 1)


class Kernel:
    """A kernel whose rows may be computed on several threads at once.

    `rows(start, end, arguments)` computes rows start … end - 1; `arguments` is the address of the int64 words
    of the call. `ns_per_row` is what a row costs, by which a call decides whether to use the team.
    """

    def __init__(self, rows: Callable[[int, int, int], None]) -> None:
        self._rows = _Code(rows, 3)

    def __call__(self, num_rows: int, ns_per_row: float, arguments: Sequence[int]) -> None:
        """Runs rows 0 … num_rows - 1. `arguments`: addresses, integers, and floats by `float_word`."""
        threads = torch.get_num_threads()
        total = num_rows * ns_per_row
        alone = threads == 1 or num_rows == 1 or total < _WORTH_WAKING_NS
        if alone or (parallel := _gomp_parallel()) is None:
            words = np.array(arguments, np.int64)
            self._rows.call(0, num_rows, words.ctypes.data)
            return
        step = max(1, min(int(_WORTH_WAKING_NS / ns_per_row), -(-num_rows // threads)))
        words = np.array((0, num_rows, step, self._rows.address, *arguments), np.int64)
        parallel(_claiming.address, words.ctypes.data, threads, 0)


class TeamKernel:
    """A kernel that runs once on each thread at the same time; the threads share the work by themselves.

    `body(arguments)` gets the address of the int64 words of the call.
    """

    def __init__(self, body: Callable[[int], None]) -> None:
        self._body = _Code(body, 1)

    def __call__(self, arguments: Sequence[int]) -> None:
        threads = torch.get_num_threads()
        words = np.array(arguments, np.int64)
        parallel = _gomp_parallel() if threads > 1 else None
        if parallel is None:
            self._body.call(words.ctypes.data)
        else:
            parallel(self._body.address, words.ctypes.data, threads, 0)


def float_word(value: float) -> int:
    """A float as the argument that `native.float32_of_word` reads."""
    return int(np.float32(value).view(np.uint32))


@cache
def _gomp_parallel() -> Any:
    """libgomp's entry, which other OpenMP libraries have too; None where torch runs on something else."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
