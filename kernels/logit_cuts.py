"""Where a filter cuts the tail off a row: found by halving a bracket of values until so few lie inside that
sorting them is cheap. What a cut is, see `kernels.logit_rows`.
"""

import math
from typing import Any

import numpy as np

from kernels.logit_rows import (
    BAND,
    CHUNK,
    count_from,
    index_in,
    key_in,
    key_of,
    key_of_value,
    mass_of,
    pack,
    sorted_band,
    value_of,
    weight_of,
)
from kernels.native import exact


@exact
def rank_cut(bits: Any, maxima: Any, lowest: Any, highest: Any, rank: Any) -> Any:
    """The cut that keeps the `rank` largest values, 0 < rank < len(bits)."""
    # count(>= high) < rank <= count(>= low), all along.
    high: Any = np.int64(highest) + 1
    above: Any = np.int64(0)
    low = np.int64(lowest)
    if rank <= len(maxima):  # as many chunks each hold a value at least this large
        low = np.int64(np.partition(maxima, len(maxima) - rank)[len(maxima) - rank])
    reached = count_from(bits, maxima, low)
    while reached - above > BAND and high - low > 1:
        middle = (low + high) // 2
        count = count_from(bits, maxima, middle)
        if count >= rank:
            low, reached = middle, count
        else:
            high, above = middle, count
    if high - low == 1:
        return low, _index_of_nth(bits, maxima, low, rank - above)
    band = sorted_band(bits, maxima, low, high, reached - above)
    packed = band[len(band) - (rank - above)]
    return np.int64(key_in(packed)), index_in(packed)


@exact
def _index_of_nth(bits: Any, maxima: Any, key: Any, nth: Any) -> Any:
    """The index of the nth (from 1) value that equals `key`; the last such one if there are fewer."""
    index = np.int64(-1)
    for c in range(len(maxima)):
        if maxima[c] >= key:
            band = sorted_band(bits[c * CHUNK : (c + 1) * CHUNK], maxima[c : c + 1], key, key + 1, CHUNK)
            if len(band):
                index = c * CHUNK + index_in(band[max(0, len(band) - nth)])
            nth -= len(band)
            if nth <= 0:
                break
    return index


@exact
def mass_cut(
    logits: Any,
    bits: Any,
    maxima: Any,
    highest: Any,
    temperature: Any,
    inverse: Any,
    top_p: Any,
    key: Any,
    last: Any,
    weights: Any,
) -> Any:
    """Of what the cut (key, last) keeps, the fewest of the largest that hold `top_p` of its weight."""
    top = value_of(highest)
    needed = top_p * mass_of(logits, bits, maxima, top, inverse, key, last, weights)
    # mass(>= high) < needed <= mass(>= low), all along; the first guesses step down from the top.
    high: Any = np.int64(highest) + 1
    above, mass_above = np.int64(0), 0.0
    low, reached = key, np.int64(-1)
    depth = 1.0
    while low == key and depth < 128.0:
        guess = np.int64(key_of_value(top - temperature * depth))
        depth *= 2.0
        if guess <= key:
            break
        if guess >= high:
            continue
        mass = mass_of(logits, bits, maxima, top, inverse, guess, np.int64(len(bits)), weights)
        count = count_from(bits, maxima, guess)
        if mass >= needed:
            low, reached = guess, count
        else:
            high, above, mass_above = guess, count, mass
    if reached < 0:
        reached = count_from(bits, maxima, low)
    while reached - above > BAND and high - low > 1:
        middle = (low + high) // 2
        mass = mass_of(logits, bits, maxima, top, inverse, middle, np.int64(len(bits)), weights)
        count = count_from(bits, maxima, middle)
        if mass >= needed:
            low, reached = middle, count
        else:
            high, above, mass_above = middle, count, mass
    if high - low == 1:
        weight = np.float64(weight_of(value_of(low), top, inverse))
        nth = np.int64(1)
        if weight > 0.0:
            nth = max(nth, np.int64(min(math.ceil((needed - mass_above) / weight), np.float64(len(bits)))))
        index = _index_of_nth(bits, maxima, low, nth)
        return low, min(index, last) if low == key else index
    band = sorted_band(bits, maxima, low, high, reached - above)
    mass, packed = mass_above, band[len(band) - 1]
    for i in range(len(band) - 1, -1, -1):
        if key_in(band[i]) == key and index_in(band[i]) > last:
            break
        packed = band[i]
        mass += np.float64(weight_of(value_of(key_in(packed)), top, inverse))
        if mass >= needed:
            break
    return np.int64(key_in(packed)), index_in(packed)


@exact
def largest(bits: Any, maxima: Any, lowest: Any, highest: Any, count: Any) -> Any:
    """The `count` largest values of a row as packed keys, ascending; 0 < count <= len(bits)."""
    key, last = np.int64(lowest), np.int64(len(bits))
    if count < len(bits):
        key, last = rank_cut(bits, maxima, lowest, highest, count)
    found = np.empty(count, np.int64)
    num_found = 0
    for c in range(len(maxima)):
        if maxima[c] >= key:
            chunk = bits[c * CHUNK : (c + 1) * CHUNK]
            for i in range(len(chunk)):
                here = key_of(chunk[i])
                if here > key or (here == key and c * CHUNK + i <= last):
                    found[num_found] = pack(here, c * CHUNK + i)
                    num_found += 1
    found.sort()
    return found
