"""An admission process on a real broker, and around it an owner and workers that only join and heartbeat."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition

from schemas import topics
from schemas.codec import encode
from schemas.fleet import join
from schemas.headers import ReplyTo, reply_headers
from schemas.priority import PriorityClass
from schemas.records import (
    Cancellation,
    ClassLimits,
    ClassLoad,
    Dispatch,
    Heartbeat,
    InferenceRequest,
    Left,
    SamplingParams,
    Tenant,
    WorkerStatus,
)
from schemas.topics import Layout
from tests.log_reader import LogReader
from tests.service_process import ServiceProcess

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
MODEL = "simulated"


def make_request(**fields: Any) -> InferenceRequest:
    """A request of tenant `demo` in class interactive, accepted now: 10 tokens in, 16 out at most."""
    max_tokens = fields.pop("max_tokens", 16)
    defaults: dict[str, Any] = {
        "request_id": os.urandom(16),
        "attempt": 1,
        "tenant": "demo",
        "priority": 0,
        "model": MODEL,
        "prompt_token_ids": list(range(10)),
        "output_token_ids": [],
        "sampling": SamplingParams(max_tokens=max_tokens),
        "reply_partition": 0,
        "owner_epoch": 1,
        "accepted_at": time.time_ns() // 1_000_000,
        "end_ms": 60_000,
    }
    return InferenceRequest(**{**defaults, **fields})


def make_status(**fields: Any) -> WorkerStatus:
    """An idle worker with 1,000 blocks and 8 sequences. What runs is interactive where nothing else is said,
    and each that waits has the same prompt."""
    defaults: dict[str, Any] = {
        "model": MODEL,
        "max_model_len": 8_192,
        "draining": False,
        "num_blocks": 1_000,
        "free_blocks": 1_000,
        "block_size": 16,
        "max_num_seqs": 8,
        "num_running": 0,
        "num_waiting": [0, 0, 0],
        "queued_prefill_tokens": 0,
        "mailbox_offsets": [0, 0, 0],
        "step_age_ms": 0,
        "step_time_ms": 5.0,
        "prefill_tokens_per_s": 1_000.0,
        "decode_tokens_per_s": 100.0,
    }
    status = WorkerStatus(**{**defaults, **fields})
    if "by_class" not in fields:
        waiting = status.queued_prefill_tokens - status.num_running
        parts = [waiting * num // (sum(status.num_waiting) or 1) for num in status.num_waiting]
        running = [
            ClassLoad(status.num_running, 0, status.num_running),
            ClassLoad(0, 0, 0),
            ClassLoad(0, 0, 0),
        ]
        status.by_class = [
            replace(load, prefill_tokens=load.prefill_tokens + part)
            for load, part in zip(running, parts, strict=True)
        ]
    return status


def make_tenant(name: str = "demo", **fields: Any) -> Tenant:
    """May ask for every class, without limits."""
    return Tenant(**{"name": name, "tier": 0, "keys": [], "limits": [], **fields})


class AdmissionProcess(ServiceProcess):
    """`python -m streams admission`."""

    def __init__(self, bootstrap: str, log_dir: Path, slot: int = 0, **settings: str) -> None:
        super().__init__(["streams", "admission"], "admission", bootstrap, LAYOUT, slot, log_dir, settings)


class Fleet(LogReader):
    """Plays owners and workers: one producer, and a reader of all that admission says."""

    def answers(self, request: InferenceRequest, kind: Any) -> list[Any]:
        """Records of a kind (or several, `A | B`) about a request, in order."""
        return [
            s.value
            for s in self.seen
            if isinstance(s.value, kind) and about(s.value) == (request.request_id, request.attempt)
        ]

    async def answer(self, request: InferenceRequest, kind: Any) -> Any:
        return (await self.wait_for(lambda: self.answers(request, kind)))[0]

    def heartbeat_of_admission(self, slot: int = 0) -> Heartbeat | None:
        return next(
            (
                s.value
                for s in reversed(self.seen)
                if isinstance(s.value, Heartbeat) and (s.value.role, s.value.slot) == ("admission", slot)
            ),
            None,
        )

    async def send(self, request: InferenceRequest) -> int:
        """Appends the request as its owner does; its offset."""
        headers = reply_headers(ReplyTo(request.request_id, request.attempt, request.reply_partition))
        partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
        metadata = await self.producer.send_and_wait(
            topics.REQUESTS, encode(request), partition=partition, headers=headers
        )
        offset: int = metadata.offset
        return offset

    async def cancel(self, request: InferenceRequest) -> None:
        record = Cancellation(request.request_id, request.attempt, request.tenant, "client went away")
        partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
        await self.producer.send_and_wait(topics.REQUESTS, encode(record), partition=partition)

    async def put_tenant(self, tenant: Tenant | None, name: str = "demo") -> None:
        value = None if tenant is None else encode(tenant)
        key = (tenant.name if tenant else name).encode()
        await self.producer.send_and_wait(topics.TENANTS, value, key=key, partition=0)


def about(record: Any) -> tuple[bytes, int] | None:
    """(request_id, attempt) of a record."""
    if isinstance(record, Dispatch):
        record = record.request
    request_id = getattr(record, "request_id", None)
    return None if request_id is None else (request_id, record.attempt)


def fleet(bootstrap: str) -> AbstractAsyncContextManager[Fleet]:
    names = (topics.TOKENS, topics.PREFILL, topics.HEARTBEATS, topics.EVENTS, topics.DECISIONS)
    return Fleet.open(bootstrap, LAYOUT, (*names, topics.dlq(topics.REQUESTS)))


@asynccontextmanager
async def worker(fleet: Fleet, slot: int, **status: Any) -> AsyncIterator[tuple[int, WorkerStatus]]:
    """A worker that joins and heartbeats until the context ends: (epoch, its status, to be changed)."""
    # As a worker does: what lies in its mailboxes already was for others.
    mailboxes = [TopicPartition(topics.PREFILL, topics.partition(slot, c)) for c in PriorityClass]
    ends = await fleet.consumer.end_offsets(mailboxes)
    epoch, nonce = await join(fleet.producer, "worker", slot, model=MODEL)
    figures = make_status(mailbox_offsets=[ends[mailbox] for mailbox in mailboxes], **status)

    async def beat() -> None:
        while True:
            heartbeat = Heartbeat("worker", slot, epoch, nonce, worker=figures)
            await fleet.producer.send_and_wait(topics.HEARTBEATS, encode(heartbeat), partition=0)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(beat())
    try:
        yield epoch, figures
    finally:
        task.cancel()
        await asyncio.wait([task])
        left = encode(Left("worker", slot, epoch, "test"))
        await fleet.producer.send_and_wait(topics.EVENTS, left, partition=0)


def limits(priority: int = 0, **fields: int) -> list[ClassLimits]:
    return [ClassLimits(priority, **fields)]
