"""Topic names, partition counts, retention, and the one partition rule. Nothing else spells these.

    partition = shard × 3 + class

so the class is `partition % 3`, and more shards only append partitions.
"""

import hashlib
import re
from dataclasses import dataclass

from schemas.priority import PriorityClass

NUM_CLASSES = len(PriorityClass)

REQUESTS = "inference.requests"
IDEMPOTENCY = "inference.idempotency"
PREFILL = "inference.prefill"
DECODE = "inference.decode"
TOKENS = "inference.tokens"
CANCELLATIONS = "inference.cancellations"
USAGE = "inference.usage"
HEARTBEATS = "fleet.heartbeats"
EVENTS = "fleet.events"
DECISIONS = "fleet.decisions"
TENANTS = "control.tenants"
MODELS = "control.models"
PRICES = "control.prices"
SPEND = "control.spend"
SCHEMAS = "control.schemas"
BATCH_JOBS = "batch.jobs"
BATCH_STATES = "batch.states"
DLQ_SUFFIX = ".dlq"
_BATCH_REQUESTS_PREFIX = "batch.requests."
_BATCH_RESULTS_PREFIX = "batch.results."

TENANT_NAME = re.compile(r"[a-z0-9-]{1,40}")

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
# How long an answer can be read again.
TOKENS_RETENTION_MS = 2 * HOUR_MS
# How long usage can be read again; the archive has it by then.
USAGE_RETENTION_MS = 30 * DAY_MS
# How long a batch can be asked for: the longest window, and as long as a file is kept by default.
BATCHES_RETENTION_MS = 37 * DAY_MS
# How long what was spent in a month can be read: it, and what is billed to it after its end.
SPEND_RETENTION_MS = 37 * DAY_MS


def partition(shard: int, priority: int) -> int:
    """The partition of `shard` (or slot) for a class."""
    return shard * NUM_CLASSES + priority


def priority_of(partition: int) -> PriorityClass:
    return PriorityClass(partition % NUM_CLASSES)


def shard_of(partition: int) -> int:
    """The shard, or slot, that a partition belongs to."""
    return partition // NUM_CLASSES


def tenant_shard(tenant: str, shards: int) -> int:
    """The shard of a tenant in hashed topics: the same in every process and release."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def tenant_partition(tenant: str, priority: int, shards: int) -> int:
    """The tenant's partition in requests, idempotency, usage, cancellations and decisions."""
    return partition(tenant_shard(tenant, shards), priority)


def slot_partitions(slot: int) -> tuple[int, ...]:
    """The partitions of a slot (or shard), highest class first."""
    return tuple(partition(slot, c) for c in PriorityClass)


def check_tenant(name: str) -> str:
    """`name`, if it is a tenant's name. Raises ValueError that says what is allowed."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(f"tenant name {name[:60]!r}: use 1 to 40 of a-z, 0-9 and '-'")
    return name


def batch_requests(tenant: str) -> str:
    return _BATCH_REQUESTS_PREFIX + check_tenant(tenant)


def batch_results(tenant: str) -> str:
    return _BATCH_RESULTS_PREFIX + check_tenant(tenant)


def tenant_of_batch_topic(topic: str) -> str | None:
    """The tenant that a `batch.requests.<tenant>` topic belongs to, None for any other topic."""
    name = topic.removeprefix(_BATCH_REQUESTS_PREFIX)
    return name if name != topic and TENANT_NAME.fullmatch(name) else None


def dlq(topic: str) -> str:
    return topic + DLQ_SUFFIX


@dataclass(frozen=True, slots=True)
class Layout:
    """How many shards and slots a deployment has, fixed when its topics are created.

    `shards` of hashed topics (also the batch coordinators' shards), `worker_slots` and `gateway_slots`
    are counts; `replication` and `min_isr` are brokers.
    """

    shards: int = 4
    worker_slots: int = 4
    gateway_slots: int = 4
    replication: int = 1
    min_isr: int = 1

    def __post_init__(self) -> None:
        for name in ("shards", "worker_slots", "gateway_slots", "replication", "min_isr"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.min_isr > self.replication:
            raise ValueError(f"min_isr {self.min_isr} is above replication {self.replication}")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    name: str
    partitions: int
    config: dict[str, str]


def _delete_after(retention_ms: int) -> dict[str, str]:
    # Kafka deletes whole closed segments only: without segment.ms prompts would stay for days.
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(retention_ms),
        "segment.ms": str(max(60_000, retention_ms // 4)),
    }


_COMPACT = {"cleanup.policy": "compact", "segment.ms": str(HOUR_MS)}


def _compact_and_delete_after(retention_ms: int) -> dict[str, str]:
    return {
        **_delete_after(retention_ms),
        "cleanup.policy": "compact,delete",
        "segment.ms": str(HOUR_MS),
    }


MAX_RECORD_BYTES = 8 << 20
MAX_DEAD_LETTER_BYTES = MAX_RECORD_BYTES + (64 << 10)
_COMMON = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(MAX_RECORD_BYTES)}


def topic_specs(layout: Layout) -> list[TopicSpec]:
    """All topics of a deployment but the tenants' own."""
    hashed = layout.shards * NUM_CLASSES
    workers = layout.worker_slots * NUM_CLASSES
    # Class 2 replies to a coordinator shard instead of a gateway slot.
    replies = max(layout.gateway_slots, layout.shards) * NUM_CLASSES
    batches = _compact_and_delete_after(BATCHES_RETENTION_MS)
    kept: list[tuple[str, int, dict[str, str]]] = [
        (REQUESTS, hashed, _delete_after(DAY_MS)),
        (IDEMPOTENCY, hashed, _delete_after(TOKENS_RETENTION_MS)),
        (PREFILL, workers, _delete_after(HOUR_MS)),
        (DECODE, workers, _delete_after(HOUR_MS)),
        (TOKENS, replies, _delete_after(TOKENS_RETENTION_MS)),
        (CANCELLATIONS, hashed, _delete_after(HOUR_MS)),
        (USAGE, hashed, _delete_after(USAGE_RETENTION_MS)),
        (HEARTBEATS, 1, _delete_after(HOUR_MS // 6)),
        (EVENTS, 1, _delete_after(7 * DAY_MS)),
        (DECISIONS, hashed, _delete_after(DAY_MS)),
        (TENANTS, 1, _COMPACT),
        (MODELS, 1, _COMPACT),
        (PRICES, 1, _COMPACT),
        (SCHEMAS, 1, _COMPACT),
        (SPEND, 1, _compact_and_delete_after(SPEND_RETENTION_MS)),
        (BATCH_JOBS, layout.shards, batches),
        (BATCH_STATES, layout.shards, batches),
        (dlq(REQUESTS), hashed, _delete_after(30 * DAY_MS)),
        (dlq(PREFILL), workers, _delete_after(30 * DAY_MS)),
        (dlq(DECODE), workers, _delete_after(30 * DAY_MS)),
        (dlq(USAGE), hashed, _delete_after(30 * DAY_MS)),
        (dlq(CANCELLATIONS), hashed, _delete_after(30 * DAY_MS)),
    ]
    return [_spec(name, count, config, layout) for name, count, config in kept]


_BY_ALL = (SCHEMAS, TENANTS, MODELS, EVENTS, HEARTBEATS, REQUESTS, TOKENS, USAGE, SPEND)
# What each role cannot do without. Topics that another one alone uses do not hold it up.
NEEDED = {
    "admission": (*_BY_ALL, IDEMPOTENCY, PREFILL, DECISIONS, dlq(REQUESTS)),
    "ledger": (*_BY_ALL, CANCELLATIONS, PRICES, BATCH_JOBS, BATCH_STATES, dlq(USAGE)),
    "gateway": (*_BY_ALL, CANCELLATIONS, BATCH_JOBS, BATCH_STATES),
}


def tenant_topic_specs(tenant: str, layout: Layout) -> list[TopicSpec]:
    """A tenant's batch doors: requests, results, and where its bad records go."""
    week, month = _delete_after(7 * DAY_MS), _delete_after(30 * DAY_MS)
    requests = batch_requests(tenant)
    return [
        _spec(requests, 1, week, layout),
        _spec(batch_results(tenant), 1, week, layout),
        # A dead letter is the record as it came, with the reason beside it.
        _spec(dlq(requests), 1, {**month, "max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}, layout),
    ]


def _spec(name: str, partitions: int, config: dict[str, str], layout: Layout) -> TopicSpec:
    return TopicSpec(name, partitions, {**_COMMON, **config, "min.insync.replicas": str(layout.min_isr)})
