"""Runs a compiled kernel on torch's own OpenMP threads, or on the calling thread alone.

A second pool of threads beside torch's would fight it for the cores: each spins while the other works. So
kernels are handed to the `GOMP_parallel` of the library that torch has loaded. Rows are claimed piece by
piece, not cut in advance: on a shared machine a thread that lost its core must not hold half of the work.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, types

from kernels.native import FAST_MATH

# Where a kernel's arguments begin; before them: the next row to claim, the end, rows of one claim.
FIRST_ARGUMENT = 3
# Work that a thread alone has done in this many ns is not worth waking another for: 3 µs where the threads
# still spin, 150 µs where they sleep (Xeon, 2 virtual cores).
_WORTH_WAKING_NS = 20_000

KernelBody = Callable[[int], None]


class Kernel:
    """A kernel that may run on several threads at once.

    `body(address)` gets the address of int64 words [next, end, step, arguments...] and works until
    `claim` at `address` gives it no more rows. `ns_per_row` is what a row costs, by which a call decides
    whether to use the team.
    """

    def __init__(self, body: KernelBody) -> None:
        self._body = body
        self._compiled: Any = None  # owns the code
        self._address = 0

    def __call__(self, num_rows: int, ns_per_row: float, arguments: Sequence[int]) -> None:
        """Runs rows 0 … num_rows - 1. `arguments`: addresses, integers, and floats by `float_word`."""
        if not self._address:
            self._compile()
        threads = torch.get_num_threads()
        total = num_rows * ns_per_row
        alone = threads == 1 or num_rows == 1 or total < _WORTH_WAKING_NS
        if alone or (parallel := _gomp_parallel()) is None:
            words = np.array((0, num_rows, num_rows, *arguments), np.int64)
            self._call(words.ctypes.data)
            return
        step = max(1, min(int(_WORTH_WAKING_NS / ns_per_row), -(-num_rows // threads)))
        words = np.array((0, num_rows, step, *arguments), np.int64)
        parallel(self._address, words.ctypes.data, threads, 0)

    def together(self, arguments: Sequence[int]) -> None:
        """Runs the body once on each thread at the same time; the arguments begin at word 0."""
        if not self._address:
            self._compile()
        threads = torch.get_num_threads()
        words = np.array(arguments, np.int64)
        parallel = _gomp_parallel() if threads > 1 else None
        if parallel is None:
            self._call(words.ctypes.data)
        else:
            parallel(self._address, words.ctypes.data, threads, 0)

    def _compile(self) -> None:
        decorate: Any = cfunc(types.void(types.int64), cache=True, fastmath=FAST_MATH, error_model="numpy")
        self._compiled = decorate(self._body)
        self._address = self._compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)


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
