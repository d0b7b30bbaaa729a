"""Records about one request: asked, dispatched, told and billed. See records.py."""

from dataclasses import dataclass, field

from schemas.sampling import SamplingParams

# inference.requests


@dataclass(slots=True)
class Idempotency:
    key: bytes
    body: bytes
    public_id: str


@dataclass(slots=True)
class InferenceRequest:
    request_id: bytes
    attempt: int
    tenant: str
    priority: int
    model: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    reply_partition: int
    owner_epoch: int
    accepted_at: int
    end_ms: int
    start_ms: int | None = None
    excluded_slots: list[int] = field(default_factory=list)
    lost_epochs: list[int] = field(default_factory=list)
    detach_ms: int = 0
    idempotency: Idempotency | None = None
    affinity: int | None = None
    allow_fallback: bool = True


@dataclass(slots=True)
class KeyedRequest:
    request_id: bytes
    key: bytes
    body: bytes
    public_id: str
    accepted_at: int
    freed: bool = False


@dataclass(slots=True)
class Cancellation:
    request_id: bytes
    attempt: int
    tenant: str
    reason: str
    slot: int | None = None
    epoch: int | None = None
    waived: bool = False
    key: bytes | None = None


@dataclass(slots=True)
class RestatedRequest:
    request_id: bytes
    attempt: int
    tenant: str
    priority: int
    input_tokens: int
    output_tokens: int
    age_ms: int
    end_ms: int


@dataclass(slots=True)
class Restate:
    owner_role: str
    owner_slot: int
    owner_epoch: int
    takeover_offset: int
    requests: list[RestatedRequest]


# inference.prefill


@dataclass(slots=True)
class Pairing:
    transfer_id: bytes
    decode_slot: int
    decode_epoch: int
    reserve_ms: int
    lease_ms: int


@dataclass(slots=True)
class Dispatch:
    slot: int
    epoch: int
    expected_output_tokens: int
    request: InferenceRequest
    pairing: Pairing | None = None


# inference.tokens: the reply partition, whose fold is the state of a request (stream_state.py)


@dataclass(slots=True)
class RateLimit:
    name: str
    limit: int
    remaining: int
    reset_ms: int


@dataclass(slots=True)
class Admitted:
    request_id: bytes
    attempt: int
    owner_epoch: int
    requests_partition: int
    requests_offset: int
    rate_limits: list[RateLimit] = field(default_factory=list)


@dataclass(slots=True)
class Dispatched:
    request_id: bytes
    attempt: int
    owner_epoch: int
    slot: int
    epoch: int
    model: str
    requests_partition: int | None = None
    requests_offset: int | None = None
    rate_limits: list[RateLimit] = field(default_factory=list)
    max_tokens: int | None = None
    prefill_slot: int | None = None
    prefill_epoch: int | None = None


@dataclass(slots=True)
class Completion:
    request_id: bytes
    attempt: int
    slot: int
    epoch: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    text_length: int | None = None
    message: str | None = None


@dataclass(slots=True)
class Rejected:
    request_id: bytes
    attempt: int
    status: int
    code: str
    message: str
    retry_after_ms: int | None = None
    rate_limits: list[RateLimit] = field(default_factory=list)


@dataclass(slots=True)
class Duplicate:
    request_id: bytes
    public_id: str
    accepted_at: int = 0


@dataclass(slots=True)
class Described:
    request_id: bytes
    body: str


@dataclass(slots=True)
class Retry:
    request_id: bytes
    attempt: int
    owner_epoch: int
    reason: str


@dataclass(slots=True)
class Failed:
    request_id: bytes
    attempt: int
    owner_epoch: int
    code: str
    message: str


@dataclass(slots=True)
class Claim:
    from_epoch: int
    by_slot: int
    by_epoch: int
    request_id: bytes | None = None


@dataclass(slots=True)
class Attach:
    request_id: bytes
    slot: int
    epoch: int


@dataclass(slots=True)
class Detach:
    request_id: bytes
    slot: int
    epoch: int
    detach_ms: int


# inference.usage


@dataclass(slots=True)
class Usage:
    request_id: bytes
    attempt: int
    sealed: bool
    tenant: str
    priority: int
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    accepted_at: int
    ended_at: int
    slot: int | None = None
    epoch: int | None = None
    first_token_ms: int | None = None
    recomputed_tokens: int = 0
