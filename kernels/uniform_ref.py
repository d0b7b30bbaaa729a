"""`kernels.uniform` in plain integers."""

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform_ref(seed: int, position: int) -> float:
    """A number in (0, 1). Any integers are taken, modulo 2⁶⁴."""
    state = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    drawn = _mix((state + (position + 1) * _GOLDEN_GAMMA) & _MASK)
    return ((drawn >> 11) + 0.5) * 2.0**-53
