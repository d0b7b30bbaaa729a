"""What the sampling kernels do with one row of logits: order its values, weigh them, and cut off its tail.

A row is looked at in chunks. The first pass notes the largest value of every chunk; later passes skip each
chunk that holds nothing large enough, so they cost what is kept and not what the vocabulary holds.

All sums are taken in an order that is spelled out here, without fused or reordered arithmetic: a row gives
the same bits alone, beside others, and in any thread.
"""

from typing import Any

import numpy as np

from kernels.native import exact, floats, int64s

CHUNK = 512
"""Values in a chunk; a power of two. As many chunks as values in each, of the largest vocabularies."""
BAND = 1024
"""So many values at most are sorted to place a cut; above it the bracket around the cut is halved first."""

LOWEST_KEY = -(2**31)
MINUS_INF_KEY = -0x7F800001
PLUS_INF_KEY = 0x7F800000

_LOWEST_KEY = np.int32(LOWEST_KEY)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LOW_HALF = np.int64(0xFFFFFFFF)

# exp for arguments in [-87, 0]: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. The reduction is Cody and
# Waite's (1980, chapter 6); the coefficients are the Taylor series', whose error of 2e-7 is fp32's own.
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: added, it leaves the nearest integer in the lowest bits
_LEAST_EXPONENT = np.float32(-87.0)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ONE_BITS, _23 = np.int32(0x3F800000), np.int32(23)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6 = np.float32(1 / 120), np.float32(1 / 720)


@exact
def doubles(address: Any, length: Any) -> Any:
    """The fp64 values at an address."""
    return int64s(address, length).view(np.float64)


@exact
def row_at(address: Any, index: Any, length: Any) -> Any:
    """Row `index` of the fp32 matrix with rows of `length` at an address."""
    return floats(address + 4 * index * length, length)


@exact
def key_of(bits: Any) -> Any:
    """fp32 bits → int32 in the order of the values; -0 is 0, NaNs lie beyond the infinities."""
    negative_zero = np.int32(bits == _LOWEST_KEY)
    return np.int32(np.int32(bits ^ np.int32(np.int32(bits >> 31) & _MAGNITUDE)) + negative_zero)


@exact
def key_of_value(value: Any) -> Any:
    return key_of(np.float32(value).view(np.int32))


@exact
def value_of(key: Any) -> Any:
    """The fp32 value of a key."""
    key = np.int32(key)
    return np.int32(key ^ np.int32(np.int32(key >> 31) & _MAGNITUDE)).view(np.float32)


@exact
def weight_of(value: Any, top: Any, inverse_temperature: Any) -> Any:
    """exp((value - top) / temperature) in fp32, for value <= top; 0 below exp(-87)."""
    exponent = np.float32(np.float32(value - top) * inverse_temperature)
    clamped = max(exponent, _LEAST_EXPONENT)
    shifted = np.float32(np.float32(clamped * _LOG2_E) + _ROUND)
    whole = np.float32(shifted - _ROUND)
    rest = np.float32(np.float32(clamped - whole * _LN2_HIGH) - whole * _LN2_LOW)
    series = _ONE + rest * (_ONE + rest * (_C2 + rest * (_C3 + rest * (_C4 + rest * (_C5 + rest * _C6)))))
    power = np.int32(np.int32(np.int32(shifted.view(np.int32)) << _23) + _ONE_BITS).view(np.float32)
    return np.float32(series * power) if exponent >= _LEAST_EXPONENT else _ZERO


@exact
def chunk_maxima(bits: Any, maxima: Any) -> Any:
    """Fills `maxima` [num_chunks] with each chunk's largest key; returns the row's lowest and highest."""
    lowest, highest = _MAGNITUDE, _LOWEST_KEY
    for c in range(len(maxima)):
        chunk = bits[c * CHUNK : (c + 1) * CHUNK]
        low, high = _MAGNITUDE, _LOWEST_KEY
        for i in range(len(chunk)):
            key = key_of(chunk[i])
            low = min(low, key)
            high = max(high, key)
        maxima[c] = high
        lowest = min(lowest, low)
        highest = max(highest, high)
    return lowest, highest


@exact
def first_of(bits: Any, maxima: Any, key: Any) -> Any:
    """The lowest index that holds `key`, the row's largest."""
    for c in range(len(maxima)):
        if maxima[c] == key:
            chunk = bits[c * CHUNK : (c + 1) * CHUNK]
            for i in range(len(chunk)):
                if key_of(chunk[i]) == key:
                    return c * CHUNK + i
    return -1


# A cut is a pair (key, last): kept are the values above `key`, and those equal to it up to index `last`. Each
# filter keeps such a prefix of the order by descending value, then ascending index.


@exact
def fill_weights(
    logits: Any, bits: Any, c: Any, top: Any, inverse_temperature: Any, key: Any, last: Any, weights: Any
) -> Any:
    """Weights [CHUNK] of chunk `c`, 0 for what the cut (key, last) drops and beyond the end of the row."""
    start = c * CHUNK
    values, chunk = logits[start : start + CHUNK], bits[start : start + CHUNK]
    key, reach = np.int32(key), np.int32(last - start)
    for i in range(len(chunk)):
        here = key_of(chunk[i])
        kept = (here > key) | ((here == key) & (np.int32(i) <= reach))
        weight = weight_of(values[i], top, inverse_temperature)
        weights[i] = weight if kept else _ZERO
    for i in range(len(chunk), CHUNK):
        weights[i] = _ZERO


@exact
def sum_of(weights: Any) -> Any:
    """The sum of [CHUNK] fp32 weights, which it overwrites: halves are added onto each other."""
    half = CHUNK // 2
    while half:
        left, right = weights[:half], weights[half : 2 * half]
        for i in range(len(left)):
            left[i] += right[i]
        half //= 2
    return np.float64(weights[0])


@exact
def mass_of(
    logits: Any, bits: Any, maxima: Any, top: Any, inverse_temperature: Any, key: Any, last: Any, weights: Any
) -> Any:
    """The sum of the kept weights, fp64 over the chunks."""
    mass: Any = 0.0
    for c in range(len(maxima)):
        if maxima[c] >= key:
            fill_weights(logits, bits, c, top, inverse_temperature, key, last, weights)
            mass += sum_of(weights)
    return mass


@exact
def count_from(bits: Any, maxima: Any, key: Any) -> Any:
    """How many values are at or above `key`."""
    key = np.int32(key)
    total: Any = 0
    for c in range(len(maxima)):
        if maxima[c] >= key:
            chunk = bits[c * CHUNK : (c + 1) * CHUNK]
            count = np.int32(0)
            for i in range(len(chunk)):
                count = np.int32(count + np.int32(key_of(chunk[i]) >= key))
            total += count
    return total


@exact
def pack(key: Any, index: Any) -> Any:
    """Sorts by key, then by descending index."""
    return (np.int64(key) << np.int64(32)) | (_LOW_HALF - np.int64(index))


@exact
def key_in(packed: Any) -> Any:
    return np.int32(packed >> np.int64(32))


@exact
def index_in(packed: Any) -> Any:
    return _LOW_HALF - (packed & _LOW_HALF)


@exact
def sorted_band(bits: Any, maxima: Any, low: Any, high: Any, size: Any) -> Any:
    """Packed values with low <= key < high in ascending order; `size` is their number, or more."""
    band = np.empty(size, np.int64)
    found = 0
    for c in range(len(maxima)):
        if maxima[c] >= low:
            chunk = bits[c * CHUNK : (c + 1) * CHUNK]
            for i in range(len(chunk)):
                key = key_of(chunk[i])
                if low <= key < high:
                    band[found] = pack(key, c * CHUNK + i)
                    found += 1
    band = band[:found]
    band.sort()
    return band
