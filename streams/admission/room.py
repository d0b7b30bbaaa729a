"""What room a request finds at a worker: what is free, and what lower classes would give it."""

from enum import Enum, IntEnum, auto
from typing import NamedTuple


class Room(IntEnum):
    """Whether a request could run at a worker now."""

    NONE = 0
    TAKEN = 1  # by lower classes, which give way in the worker's next step
    FREE = 2


class Part(Enum):
    """What of a request a worker is to do."""

    WHOLE = auto()
    PREFILL = auto()  # its prompt, and the first token
    DECODE = auto()  # the rest, on KV that comes from a prefill slot


class Lower(NamedTuple):
    """What lower classes have at a worker: as its heartbeat tells, on its way from here and from others."""

    told_seqs: int
    told_blocks: int
    flying_seqs: int
    flying_blocks: int
    unseen_seqs: int

    @property
    def num_seqs(self) -> int:
        return self.told_seqs + self.flying_seqs + self.unseen_seqs

    @property
    def blocks(self) -> int:
        return self.told_blocks + self.flying_blocks
