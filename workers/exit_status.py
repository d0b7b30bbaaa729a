"""How a worker process ends, as its parent reads it."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """CONFIG: it never began. SUPERSEDED: another process has the slot. The last are about the engine."""

    STOPPED = 0
    FAILED = 1
    CONFIG = 2
    SUPERSEDED = 3
    CANARY_FAILED = 4
    ENGINE_STALLED = 5
    RANK_DIED = 6
