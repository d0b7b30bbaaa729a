"""The time as records and APIs have it."""

import time


def epoch_ms() -> int:
    """Milliseconds of the epoch, by this host's clock."""
    return time.time_ns() // 1_000_000
