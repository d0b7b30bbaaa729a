"""Who is alive, judged on the log's clock (architecture §3), and how a process joins.

Heartbeats of the whole fleet lie in one partition with the broker's timestamps. A slot is lost when the
newest heartbeat of anyone is 1 s younger than its own last. So a stalled broker ages nobody, and a
watcher that was stopped and wakes accuses nobody: it judges only while its own heartbeat comes back.
"""

import asyncio
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from schemas import topics
from schemas.codec import encode
from schemas.handoff_records import WorkerRole
from schemas.records import Drain, Heartbeat, Join, Left

HEARTBEAT_INTERVAL_S = 0.1
SILENCE_MS = 1_000
MAX_GAP_MS = 300
OWN_HEARTBEAT_MS = 500

# Settings for aiokafka that all services share.
PRODUCER_SETTINGS: dict[str, Any] = {
    "acks": "all",
    "enable_idempotence": True,
    "linger_ms": 0,
    "max_request_size": 8 << 20,
    "request_timeout_ms": 20_000,
}
# acks=1 delivers no sooner than all and may double, which harms no heartbeat.
HEARTBEAT_PRODUCER_SETTINGS: dict[str, Any] = {"acks": 1, "linger_ms": 0, "request_timeout_ms": 2_000}
# For partitions assigned by hand: what is out of range must be seen, not skipped.
CONSUMER_SETTINGS: dict[str, Any] = {
    "enable_auto_commit": False,
    "auto_offset_reset": "none",
    "max_partition_fetch_bytes": 8 << 20,
    "fetch_max_wait_ms": 500,
}
# One fetch is in flight per broker: while a partition's records wait to be taken for longer than 0.1 s, the
# others are fetched alone, and what comes for that one lies there until this is over. So where somebody waits
# for what is read, a fetch of nothing ends soon.
BUSY_FETCH_WAIT_MS = 100
BUSY_CONSUMER_SETTINGS: dict[str, Any] = {**CONSUMER_SETTINGS, "fetch_max_wait_ms": BUSY_FETCH_WAIT_MS}

FleetEvent = Join | Drain | Left

# Reasons in Left that say something about what the run gave.
LEFT_CANARY_FAILED = "canary_failed"
LEFT_ENGINE_STALLED = "engine_stalled"


class CanaryStatus(StrEnum):
    """What a worker says of its engine. FAILED: it computes wrong tokens, and will leave. ENGINE_STALLED: a
    step lasts too long; it may get over it. With either, it gets no work."""

    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"
    ENGINE_STALLED = "engine_stalled"


class LogClock:
    """Milliseconds of heartbeat log that passed; gaps of more than 300 ms do not count."""

    __slots__ = ("_last", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0
        self._last: int | None = None

    def advance(self, timestamp_ms: int) -> int:
        """Takes the next record's broker time and returns the clock."""
        if self._last is not None:
            step = timestamp_ms - self._last
            if 0 < step <= MAX_GAP_MS:
                self.now_ms += step
        self._last = timestamp_ms if self._last is None else max(self._last, timestamp_ms)
        return self.now_ms


@dataclass(slots=True)
class Member:
    """The newest known life of a slot. `last_ms` is on the log's clock, `heard_at` the broker's time of
    `heartbeat` (ms of the epoch)."""

    role: str
    slot: int
    epoch: int
    last_ms: int
    heartbeat: Heartbeat | None = None
    draining: bool = False
    left: str | None = None
    heard_at: int = 0


class FleetView:
    """The fleet as one watcher sees it: fed with fleet.heartbeats and fleet.events, in order. Pure."""

    def __init__(self) -> None:
        self.clock = LogClock()
        self._members: dict[tuple[str, int], Member] = {}
        self._own: tuple[str, int, int] | None = None
        self._own_last_ms: int | None = None

    def watch_as(self, role: str, slot: int, epoch: int) -> None:
        """Names the watcher, whose own heartbeats must come back before it may judge silence."""
        self._own, self._own_last_ms = (role, slot, epoch), None

    def on_heartbeat(self, heartbeat: Heartbeat, timestamp_ms: int) -> None:
        now = self.clock.advance(timestamp_ms)
        key = (heartbeat.role, heartbeat.slot)
        if self._own == (*key, heartbeat.epoch):
            self._own_last_ms = now
        member = self._members.get(key)
        if member is None or heartbeat.epoch > member.epoch:
            self._members[key] = Member(*key, heartbeat.epoch, now, heartbeat, heard_at=timestamp_ms)
        elif heartbeat.epoch == member.epoch:
            _keep_sketch(member.heartbeat, heartbeat)
            member.last_ms, member.heartbeat, member.heard_at = now, heartbeat, timestamp_ms

    def on_event(self, event: FleetEvent, offset: int) -> None:
        """`offset` is the event's own in fleet.events: for a Join it is the epoch."""
        key = (event.role, event.slot)
        epoch = offset if isinstance(event, Join) else event.epoch
        member = self._members.get(key)
        if member is None or epoch > member.epoch:
            member = self._members[key] = Member(*key, epoch, self.clock.now_ms)
        if epoch < member.epoch:
            return
        if isinstance(event, Left):
            member.left = event.reason
        elif isinstance(event, Drain):
            member.draining = True

    @property
    def may_judge(self) -> bool:
        return self._own_last_ms is not None and self.clock.now_ms - self._own_last_ms <= OWN_HEARTBEAT_MS

    @property
    def heard_all(self) -> bool:
        """Whether who lives was heard: the log was followed for three heartbeats."""
        return self.clock.now_ms >= MAX_GAP_MS

    def gone(self, role: str, slot: int, epoch: int) -> str | None:
        """Why that life of the slot is over (left, superseded, silent), or None while it may live."""
        member = self._members.get((role, slot))
        if member is None or member.epoch < epoch:
            return None
        if member.epoch > epoch:
            return f"superseded by epoch {member.epoch}"
        if member.left is not None:
            return f"left: {member.left}"
        if self.may_judge and self.clock.now_ms - member.last_ms >= SILENCE_MS:
            return "silent"
        return None

    def computes_wrong(self, slot: int, epoch: int) -> bool:
        """Whether that run's canary failed, by its own word: nothing that it gave can be relied on."""
        member = self._members.get(("worker", slot))
        if member is None or member.epoch != epoch:
            return False
        return member.left == LEFT_CANARY_FAILED or _canary(member) == CanaryStatus.FAILED

    def canary_passed(self, slot: int, epoch: int) -> int:
        """The last run of that run's canary that passed, by its own word."""
        member = self._members.get(("worker", slot))
        if member is None or member.epoch != epoch or member.heartbeat is None:
            return 0
        status = member.heartbeat.worker
        return 0 if status is None else status.canary_passed

    def stalled(self, slot: int, epoch: int) -> bool:
        """Whether that run says that a step lasts too long. It may get over it."""
        member = self._members.get(("worker", slot))
        return (
            member is not None
            and member.epoch == epoch
            and (_canary(member) == CanaryStatus.ENGINE_STALLED or member.left == LEFT_ENGINE_STALLED)
        )

    def heard_ms(self, role: str, slot: int) -> int | None:
        """When a slot was last heard, on the log's clock; None if never by this watcher."""
        member = self._members.get((role, slot))
        return None if member is None else member.last_ms

    def live(self, role: str) -> list[Member]:
        """Members that heartbeat and are not gone, by slot."""
        return [
            m
            for (r, _), m in sorted(self._members.items())
            if r == role and m.heartbeat is not None and self.gone(r, m.slot, m.epoch) is None
        ]

    def over(self, role: str) -> list[Member]:
        """The last lives of slots that are gone and have no later one, by slot."""
        return [
            m
            for (r, _), m in sorted(self._members.items())
            if r == role and self.gone(r, m.slot, m.epoch) is not None
        ]

    def live_slots(self, role: str) -> set[int]:
        """Slots of the members that heartbeat and are not gone."""
        return {m.slot for m in self.live(role)}

    def epoch_of(self, role: str, slot: int) -> int | None:
        """The highest epoch seen in a slot."""
        member = self._members.get((role, slot))
        return None if member is None else member.epoch


def _keep_sketch(old: Heartbeat | None, new: Heartbeat) -> None:
    # A worker sends it once in a while: what it said last holds until then.
    if old is not None and old.worker is not None and new.worker is not None and not new.worker.prefix_sketch:
        new.worker.prefix_sketch = old.worker.prefix_sketch


def _canary(member: Member) -> str | None:
    status = None if member.heartbeat is None else member.heartbeat.worker
    return None if status is None else status.canary


class Producer(Protocol):
    """The part of AIOKafkaProducer that joining needs."""

    async def send_and_wait(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, partition: int | None = None
    ) -> Any: ...


async def join(
    producer: Producer,
    role: str,
    slot: int,
    address: str | None = None,
    model: str | None = None,
    worker_role: WorkerRole = WorkerRole.UNIFIED,
) -> tuple[int, bytes]:
    """Appends Join; returns (epoch, nonce): the record's offset is the epoch. The caller sets a deadline."""
    nonce = secrets.token_bytes(8)
    record = Join(role, slot, nonce, address, model, worker_role.value)
    metadata = await producer.send_and_wait(topics.EVENTS, encode(record), partition=0)
    return metadata.offset, nonce


async def publish_schemas(producer: Producer, schemas: dict[str, str]) -> None:
    """Puts the writer's schemas into control.schemas before it writes anything else."""
    # All at once, so that they are one batch and not a round trip each at every start.
    await asyncio.gather(
        *(
            producer.send_and_wait(topics.SCHEMAS, text.encode(), key=fingerprint.encode(), partition=0)
            for fingerprint, text in schemas.items()
        )
    )
