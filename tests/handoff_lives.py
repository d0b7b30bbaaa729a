"""The two workers of the handoff's world: their lives, blocks, memory and calls."""

from collections import deque
from dataclasses import dataclass, field

from schemas.kv_layout import KVLayout
from schemas.records import Dispatch, Handoff, Offer, Reserved
from workers.block_pool import BlockPool
from workers.handoff.decode_side import DecodeSide
from workers.handoff.effects import Effect
from workers.handoff.prefill_side import PrefillSide

BLOCK_SIZE = 4
LAYOUT = KVLayout(BLOCK_SIZE, "float32", 1, 1, 1, 4)
NUM_BLOCKS = 7
RESERVE_MS, LEASE_MS = 400, 1000
LANDING_S = 0.5
JUMPS_S = (0.01, 0.02, 0.1, 0.3)  # a busy process looks at its clock late
STOPS_S = (0.4, 2.0, 45.0, 600.0)  # one that was stopped, much later
SILENCE_S = 1.0
PREFILL_SLOT, DECODE_SLOT = 0, 1


class Violation(AssertionError):
    """Something that the protocol promises never to happen."""


@dataclass(eq=False)
class Call:
    """A write that runs: of one block. `lands_by`: a dead process's bytes arrive by then or never."""

    transfer_id: bytes
    index: int
    source: int
    target: int
    prefill: "Prefill"
    decode: "Decode"
    has_landed: bool = False
    has_failed: bool = False
    lands_by: float = float("inf")


@dataclass(eq=False)
class Sequence:
    """A request at prefill: its blocks, how many are computed, and its writer."""

    dispatch: Dispatch
    blocks: list[int]
    computed: int = 0
    computes: bool = True
    reserved: Reserved | None = None
    stopping: bool = False
    closed: bool = False
    may_land: bool = False
    begun: int = 0
    calls: list[Call] = field(default_factory=list)
    finished: bool = False


@dataclass(eq=False)
class Prefill:
    """One life of the prefill worker."""

    side: PrefillSide
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    memory: list[int] = field(default_factory=lambda: [0] * NUM_BLOCKS)
    sequences: dict[bytes, Sequence] = field(default_factory=dict)
    deadlines: dict[bytes, float] = field(default_factory=dict)
    died_at: float | None = None
    stopped_at: float | None = None


@dataclass(eq=False)
class Decode:
    """One life of the decode worker. `running` are adopted or computed requests, with their blocks."""

    side: DecodeSide
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    memory: list[int] = field(default_factory=lambda: [0] * NUM_BLOCKS)
    inputs: deque[Effect] = field(default_factory=deque)
    waiting: list[Offer] = field(default_factory=list)
    reserved: dict[bytes, list[int]] = field(default_factory=dict)
    running: dict[bytes, tuple[list[int], list[int]]] = field(default_factory=dict)
    verifying: list[Handoff] = field(default_factory=list)
    served: dict[bytes, str] = field(default_factory=dict)
    deadlines: dict[bytes, float] = field(default_factory=dict)
    died_at: float | None = None
    stopped_at: float | None = None


def contents(request_id: bytes, num_tokens: int) -> list[int]:
    """What the request's blocks must hold."""
    first = int.from_bytes(request_id, "big") * 1000
    return [first + index for index in range(-(-num_tokens // BLOCK_SIZE))]
