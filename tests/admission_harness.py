"""An admission process on a real broker, and around it an owner and workers that only join and heartbeat."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.local.ports import claim_port
from schemas import topics
from schemas.codec import decode, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS, join
from schemas.headers import Headers, ReplyTo, reply_headers
from schemas.records import (
    Cancellation,
    ClassLimits,
    Dispatch,
    Heartbeat,
    InferenceRequest,
    Left,
    SamplingParams,
    Tenant,
    WorkerStatus,
)
from schemas.topics import Layout

DEADLINE_S = 30.0
LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
ROOT = Path(__file__).parent.parent
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
    """An idle worker with 1,000 blocks and 8 sequences."""
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
    return WorkerStatus(**{**defaults, **fields})


def make_tenant(name: str = "demo", **fields: Any) -> Tenant:
    """May ask for every class, without limits."""
    return Tenant(**{"name": name, "tier": 0, "keys": [], "limits": [], **fields})


class AdmissionProcess:
    """`python -m streams admission`."""

    def __init__(self, bootstrap: str, log_dir: Path, slot: int = 0, **settings: str) -> None:
        self.port = claim_port(0, "admission", random.Random())
        self.log_file = log_dir / f"admission-{slot}-{self.port}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        env |= {
            "HEADRACE_KAFKA": bootstrap,
            "HEADRACE_SLOT": str(slot),
            "HEADRACE_HTTP_PORT": str(self.port),
            "HEADRACE_SHARDS": str(LAYOUT.shards),
            "HEADRACE_WORKER_SLOTS": str(LAYOUT.worker_slots),
            "HEADRACE_GATEWAY_SLOTS": str(LAYOUT.gateway_slots),
            **settings,
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streams", "admission"], env=env, cwd=ROOT, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.get("/health/ready")[0] != 200:
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < deadline, self.log_file.read_text()
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        """(status, body); status 0 when nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Seen:
    """A record as it lies in the log. `value` is None where it cannot be decoded."""

    topic: str
    partition: int
    offset: int
    value: Any
    raw: bytes
    headers: Headers


@dataclass
class Fleet:
    """Plays owners and workers: one producer, and a reader of all that admission says."""

    producer: AIOKafkaProducer
    consumer: AIOKafkaConsumer
    seen: list[Seen] = field(default_factory=list)

    async def wait_for(self, condition: Callable[[], Any], timeout: float = DEADLINE_S) -> Any:
        """Reads on until the condition gives something, and returns that."""
        async with asyncio.timeout(timeout):
            while not (result := condition()):
                await self._read()
            return result

    async def read_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await self._read()

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

    async def _read(self) -> None:
        for records in (await self.consumer.getmany(timeout_ms=20)).values():
            for r in records:
                try:
                    value = decode(r.value)
                except ValueError:
                    value = None
                self.seen.append(Seen(r.topic, r.partition, r.offset, value, r.value, list(r.headers)))


def about(record: Any) -> tuple[bytes, int] | None:
    """(request_id, attempt) of a record."""
    if isinstance(record, Dispatch):
        record = record.request
    request_id = getattr(record, "request_id", None)
    return None if request_id is None else (request_id, record.attempt)


@asynccontextmanager
async def fleet(bootstrap: str) -> AsyncIterator[Fleet]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **PRODUCER_SETTINGS)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **CONSUMER_SETTINGS)
    await producer.start()
    await consumer.start()
    try:
        names = [
            topics.TOKENS,
            topics.PREFILL,
            topics.HEARTBEATS,
            topics.DECISIONS,
            topics.dlq(topics.REQUESTS),
        ]
        counts = {spec.name: spec.partitions for spec in topics.topic_specs(LAYOUT)}
        partitions = [TopicPartition(name, p) for name in names for p in range(counts[name])]
        consumer.assign(partitions)
        for partition, end in (await consumer.end_offsets(partitions)).items():
            consumer.seek(partition, end)
        yield Fleet(producer, consumer)
    finally:
        await consumer.stop()
        await producer.stop()


@asynccontextmanager
async def worker(fleet: Fleet, slot: int, **status: Any) -> AsyncIterator[tuple[int, WorkerStatus]]:
    """A worker that joins and heartbeats until the context ends: (epoch, its status, to be changed)."""
    epoch, nonce = await join(fleet.producer, "worker", slot, model=MODEL)
    figures = make_status(**status)

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
