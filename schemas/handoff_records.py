"""Records of inference.decode: a prefilled request goes from one worker to another. See records.py."""

from dataclasses import dataclass, field
from enum import StrEnum

from schemas.kv_layout import KVLayout
from schemas.request_records import InferenceRequest
from schemas.sampling import TokenLogprobs


class WorkerRole(StrEnum):
    """What a worker does of a request: all of it, its prompt, or its output."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Offer:
    transfer_id: bytes
    prefill_slot: int
    prefill_epoch: int
    decode_slot: int
    decode_epoch: int
    reserve_ms: int
    lease_ms: int
    expected_output_tokens: int
    layout: KVLayout
    request: InferenceRequest


@dataclass(slots=True)
class PoolRank:
    segment: str
    keys_address: int
    values_address: int
    num_blocks: int


@dataclass(slots=True)
class Reserved:
    transfer_id: bytes
    request_id: bytes
    attempt: int
    prefill_slot: int
    prefill_epoch: int
    decode_slot: int
    decode_epoch: int
    num_cached_tokens: int
    block_ids: list[int]
    layout: KVLayout
    ranks: list[PoolRank]


@dataclass(slots=True)
class ContentCheck:
    layer: int
    values: bool
    block: int
    first_head: int
    num_heads: int
    digest: bytes


@dataclass(slots=True)
class Handoff:
    request_id: bytes
    attempt: int
    prefill_slot: int
    prefill_epoch: int
    decode_slot: int
    decode_epoch: int
    lease_ms: int
    block_ids: list[int]
    num_tokens: int
    first_token_id: int
    checksum: bytes
    transfer_id: bytes = b""
    layout: KVLayout | None = None
    first_token_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    content_checks: list[ContentCheck] = field(default_factory=list)
    canary: int = -1


@dataclass(slots=True)
class TransferEnded:
    transfer_id: bytes
    request_id: bytes
    attempt: int
    from_slot: int
    from_epoch: int
    to_slot: int
    to_epoch: int
    state: str
    writes_closed: bool
    may_land: bool
    reason: str = ""


Message = Offer | Reserved | Handoff | TransferEnded
"""What lies on inference.decode."""
