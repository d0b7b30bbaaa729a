"""What the two sides of the protocol want done. They decide and do nothing themselves."""

from dataclasses import dataclass

from schemas.handoff_records import Message
from schemas.priority import PriorityClass
from schemas.records import Handoff, Offer, Reserved


@dataclass(frozen=True, slots=True)
class Send:
    """To the `inference.decode` partition of a slot."""

    slot: int
    priority: PriorityClass
    record: Message


@dataclass(frozen=True, slots=True)
class StartWrites:
    """Prefill: write what is computed, and what will be, to where `reserved` says."""

    reserved: Reserved


@dataclass(frozen=True, slots=True)
class StopWrites:
    """Prefill: begin no more calls, and say `on_closed` when none runs: at once, if that is so already."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class StopPrefill:
    """Prefill: compute no more of it. Its blocks stay until FreeBlocks."""

    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """End the transfer's hold on its blocks, or its wait for some. Doing it twice does nothing."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """Decode: take blocks for all tokens of the request, what is cached shared, and say `on_room`."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Verify:
    """Decode: compare the reserved blocks' bytes with the checks of `handoff`, and say `on_verified`."""

    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Adopt:
    """Decode: the request runs from here, with the reserved blocks as its own and its first token sampled."""

    offer: Offer
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Recompute:
    """Decode: the request starts here as if it had been dispatched to this run alone."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class RetryElsewhere:
    """Decode: it is too late to compute it here. Its owner must hear that this run does not serve it."""

    offer: Offer
    reason: str


Effect = (
    Send
    | StartWrites
    | StopWrites
    | StopPrefill
    | FreeBlocks
    | Reserve
    | Verify
    | Adopt
    | Recompute
    | RetryElsewhere
)
