"""Random numbers by counting: draw `position` of the SplitMix64 generator that starts at a hash of `seed`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.native import exact

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11, _1 = (np.uint64(n) for n in (30, 27, 31, 11, 1))


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """For each (seed, position) [n] a number in (0, 1), [n]. The seed is hashed first, or neighbouring seeds
    would share shifted sequences."""
    drawn: npt.NDArray[np.float64] = _uniform(seeds, positions.view(np.uint64))
    return drawn


@exact
def _mix(value: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014, figure 1, with Stafford's mix 13)."""
    value = (value ^ (value >> _30)) * _MIX_1
    value = (value ^ (value >> _27)) * _MIX_2
    return value ^ (value >> _31)


@exact
def _uniform(seeds: Any, positions: Any) -> Any:
    drawn = np.empty(len(seeds), np.float64)
    for i in range(len(seeds)):
        state = _mix(seeds[i] + _GOLDEN_GAMMA)
        bits = _mix(state + (positions[i] + _1) * _GOLDEN_GAMMA)
        drawn[i] = (np.float64(bits >> _11) + 0.5) * 2.0**-53
    return drawn
