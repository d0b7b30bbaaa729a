"""What compiled CPU kernels need and numba does not offer: raw memory, bf16, a fast exp, atomic claims.

Kernels take addresses instead of arrays: tensors go in and out without a copy, and a call costs microseconds.
Everything here is for use inside functions that are decorated with `compiled`.
"""

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels import native_cache

numba.config.CACHE_DIR = str(native_cache.use(native_cache.folder(), time.time()))  # type: ignore[attr-defined]

P = ParamSpec("P")
R = TypeVar("R")

# Sums may be reordered, so that they run in vector registers. NaN and infinity keep their meaning: the
# sampler refuses them.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles with numba on first use (or takes it from the cache on disk); the GIL is not held in it."""
    result: Callable[P, R] = njit(cache=True, nogil=True, fastmath=FAST_MATH, error_model="numpy")(function)
    return result


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, but every operation rounds as it is written."""
    # Fast math must be refused by name: a function without a word on it takes over what its caller has.
    result: Callable[P, R] = njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)
    return result


def intrinsic_of(function: Callable[..., Any]) -> Any:
    """Code in LLVM's terms. What kernels call has no typing context, which type checkers do not know."""
    return cast(Any, intrinsic(function))


def literal_intrinsic_of(function: Callable[..., Any]) -> Any:
    """As `intrinsic_of`, for code that depends on numbers which are written out in the call."""
    return cast(Any, intrinsic(prefer_literal=True)(function))


_carray: Any = numba.carray  # type: ignore[attr-defined]


@intrinsic_of
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic_of
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic_of
def _bits_of_float(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic_of
def claim(typing_context: Any, address: Any, amount: Any) -> Any:
    """Adds `amount` to the int64 at `address` in one piece and returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic_of
def call_range(typing_context: Any, function: Any, start: Any, end: Any, arguments: Any) -> Any:
    """Calls the compiled `(start, end, arguments)` whose code is at the address `function`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic_of
def peek(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`; what was written before a `claim` that shows in it can be read after."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


def emit_prefetch(builder: Any, address: Any) -> None:
    """For use in intrinsics; see `prefetch`."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    # To read, into the second level, data.
    builder.call(function, [pointer, flag(0), flag(2), flag(1)])


@intrinsic_of
def prefetch(typing_context: Any, address: Any) -> Any:
    """Begins to bring the cache line at `address` near, and waits for nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


_yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
_SPINS = 2000


@compiled
def wait_for(address: int, value: int) -> None:
    """Returns when the int64 at `address` has reached `value`. For what takes other threads microseconds: it
    spins, and offers its core to others after a while."""
    spins = 0
    while peek(address) < value:
        spins += 1
        if spins > _SPINS:
            _yield_core()


@compiled
def floats(address: int, length: int) -> Any:
    """The fp32 values at an address."""
    return _carray(_pointer(address), (length,), np.float32)


@compiled
def bf16s(address: int, length: int) -> Any:
    """The bf16 values at an address, as uint16: see `from_bf16`."""
    return _carray(_pointer(address), (length,), np.uint16)


@compiled
def bytes_at(address: int, length: int) -> Any:
    """The uint8 values at an address."""
    return _carray(_pointer(address), (length,), np.uint8)


@compiled
def signed_bytes(address: int, length: int) -> Any:
    """The int8 values at an address."""
    return _carray(_pointer(address), (length,), np.int8)


@compiled
def int32s(address: int, length: int) -> Any:
    """The int32 values at an address."""
    return _carray(_pointer(address), (length,), np.int32)


@compiled
def int64s(address: int, length: int) -> Any:
    """The int64 values at an address."""
    return _carray(_pointer(address), (length,), np.int64)


@literal_intrinsic_of
def words_at(typing_context: Any, address: Any, count: Any) -> Any:
    """The `count` int64 words at an address as a tuple: arguments of a call."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        places = [builder.gep(first, [ir.Constant(ir.IntType(64), i)]) for i in range(count.literal_value)]
        words = [builder.load(place) for place in places]
        return context.make_tuple(builder, signature.return_type, words)

    uniform: Any = types.UniTuple
    return uniform(types.int64, count.literal_value)(types.int64, count), generate


@compiled
def float32_of_word(word: Any) -> Any:
    """The fp32 value whose bits are the low half of an int64 argument: see `team.float_word`."""
    return _float_of_bits(np.uint32(word))


@compiled
def from_bf16(bits: Any) -> Any:
    """bf16 to fp32, which is exact."""
    return _float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@compiled
def to_bf16(value: Any) -> Any:
    """fp32 to bf16, to nearest, ties to even. A NaN stays one as long as its high bits say so."""
    bits = _bits_of_float(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@compiled
def magnitude_bits(value: Any) -> Any:
    """The bits of |value|, ordered as the magnitudes are, NaN above all. Integer maxima vectorize."""
    return np.uint32(_bits_of_float(value) & np.uint32(0x7FFFFFFF))


@compiled
def magnitude_of(bits: Any) -> Any:
    """The inverse of `magnitude_bits`."""
    return _float_of_bits(bits)


@compiled
def exp(x: Any) -> Any:
    """e^x in fp32 with a relative error of 3e-7, without a call, so that loops over it run in vectors.

    Cody and Waite's reduction and the polynomial of Cephes' expf; x is clamped to ±87.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits(np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)))
