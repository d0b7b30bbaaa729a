"""Records about the fleet, its tenants and models, and of the batch doors. See records.py."""

from dataclasses import dataclass, field

from schemas.kv_layout import KVLayout

# fleet.heartbeats, fleet.events, fleet.decisions


@dataclass(slots=True)
class ClassLoad:
    num_running: int
    num_blocks: int
    prefill_tokens: int


@dataclass(slots=True)
class WorkerStatus:
    model: str
    max_model_len: int
    draining: bool
    num_blocks: int
    free_blocks: int
    block_size: int
    max_num_seqs: int
    num_running: int
    num_waiting: list[int]
    queued_prefill_tokens: int
    mailbox_offsets: list[int]
    step_age_ms: int
    step_time_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    canary: str = "unknown"
    prefix_sketch: bytes = b""
    by_class: list[ClassLoad] = field(default_factory=list)
    num_gpus: int = 1
    worker_role: str = "unified"
    kv_layout: KVLayout | None = None
    transfer_bytes_per_s: float = 0.0
    handoffs: list[bytes] = field(default_factory=list)
    canary_passed: int = 0


@dataclass(slots=True)
class QueuedTokens:
    model: str
    priority: int
    tokens: int


@dataclass(slots=True)
class PartitionStatus:
    partition: int
    takeover_offset: int
    read_offset: int
    queued: list[QueuedTokens]


@dataclass(slots=True)
class Heartbeat:
    role: str
    slot: int
    epoch: int
    nonce: bytes
    address: str | None = None
    worker: WorkerStatus | None = None
    partitions: list[PartitionStatus] = field(default_factory=list)
    coordinator_shards: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Join:
    role: str
    slot: int
    nonce: bytes
    address: str | None = None
    model: str | None = None
    worker_role: str = "unified"


@dataclass(slots=True)
class Drain:
    role: str
    slot: int
    epoch: int


@dataclass(slots=True)
class Left:
    role: str
    slot: int
    epoch: int
    reason: str


@dataclass(slots=True)
class Shedding:
    model: str
    level: int
    before: int
    wait_ms: int
    kv_use: float
    slot: int
    epoch: int


@dataclass(slots=True)
class Unpaired:
    model: str
    role: str
    is_missing: bool
    slot: int
    epoch: int


@dataclass(slots=True)
class Decision:
    request_id: bytes
    attempt: int
    tenant: str
    priority: int
    model: str
    action: str
    reason: str
    inputs: dict[str, float]
    slot: int | None = None
    epoch: int | None = None


@dataclass(slots=True)
class Preemption:
    request_id: bytes
    attempt: int
    tenant: str
    priority: int
    model: str
    slot: int
    epoch: int
    reason: str
    mode: str
    tokens_lost: int
    for_request_id: bytes | None = None


# control.tenants, control.models, control.prices, control.spend


@dataclass(slots=True)
class ApiKey:
    key_id: str
    sha256: bytes
    created_at: int


@dataclass(slots=True)
class ClassLimits:
    priority: int
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_enqueued_tokens: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Budget:
    amount: str
    currency: str
    alert_percents: list[int]
    hard_stop: bool = True


@dataclass(slots=True)
class Tenant:
    name: str
    tier: int
    keys: list[ApiKey]
    limits: list[ClassLimits]
    weight: float = 1.0
    disabled: bool = False
    allowed_models: list[str] | None = None
    budget: Budget | None = None


@dataclass(slots=True)
class Model:
    id: str
    fallback_models: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Price:
    model: str
    priority: int
    valid_from: int
    currency: str
    input_price: str
    cached_input_price: str
    output_price: str


@dataclass(slots=True)
class Amount:
    currency: str
    amount: str


@dataclass(slots=True)
class Spend:
    tenant: str
    month: str
    amounts: list[Amount]
    alerted: list[str]


# batch.requests.<tenant>, batch.results.<tenant>, for producers who prefer Avro to JSON


@dataclass(slots=True)
class BatchRequest:
    custom_id: str
    body: str
    method: str | None = None
    url: str | None = None


@dataclass(slots=True)
class BatchResult:
    id: str
    custom_id: str
    status_code: int | None = None
    body: str | None = None
    error_code: str | None = None
    error_message: str | None = None
