"""A worker process on a real broker, and a client that plays owner and admission around it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.local.ports import claim_port
from schemas import topics
from schemas.codec import CodecError, decode, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.headers import Headers
from schemas.records import (
    Cancellation,
    Completion,
    Dispatch,
    Heartbeat,
    InferenceRequest,
    SamplingParams,
    Tokens,
    Usage,
)
from schemas.stream_state import Run, StreamState
from schemas.topics import Layout

DEADLINE_S = 30.0
LAYOUT = Layout(shards=2, worker_slots=6, gateway_slots=2)
ROOT = Path(__file__).parent.parent


class WorkerProcess:
    """`python -m workers` with the simulated runner."""

    def __init__(self, bootstrap: str, slot: int, log_dir: Path, settings: Mapping[str, str]) -> None:
        self.slot = slot
        self.port = claim_port(0, "worker", random.Random())
        self.log_file = log_dir / f"worker-{slot}-{self.port}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        env |= {
            "HEADRACE_KAFKA": bootstrap,
            "HEADRACE_SLOT": str(slot),
            "HEADRACE_HTTP_PORT": str(self.port),
            "HEADRACE_SHARDS": str(LAYOUT.shards),
            "HEADRACE_WORKER_SLOTS": str(LAYOUT.worker_slots),
            "HEADRACE_GATEWAY_SLOTS": str(LAYOUT.gateway_slots),
            "HEADRACE_MODELS_DIR": str(log_dir / "models"),
            "HEADRACE_RUNNER": "simulated",
            **settings,
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers"], env=env, cwd=ROOT, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.get("/health/ready")[0] != 200:
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < deadline, self.log_file.read_text()
            time.sleep(0.02)

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

    @property
    def child_pid(self) -> int:
        """The worker proper, under its parent."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()


@dataclass
class Seen:
    """A record as it lies in the log. `value` is None where it cannot be decoded."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    value: Any
    headers: Headers


@dataclass
class FleetClient:
    """Reads all that workers say from when it was made on, in the order of each partition."""

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

    def values(self, kind: type[Any]) -> list[Any]:
        return [s.value for s in self.seen if isinstance(s.value, kind)]

    async def epoch(self, slot: int) -> int:
        """The epoch that now heartbeats in a slot."""
        heartbeat: Heartbeat = await self.wait_for(lambda: self.heartbeat(slot))
        return heartbeat.epoch

    def heartbeat(self, slot: int) -> Heartbeat | None:
        """The newest of a slot."""
        return next((h for h in reversed(self.values(Heartbeat)) if h.slot == slot), None)

    async def dispatch(self, slot: int, epoch: int, request: InferenceRequest) -> None:
        record = Dispatch(slot, epoch, 32, request)
        await self.producer.send_and_wait(
            topics.PREFILL, encode(record), partition=topics.partition(slot, request.priority)
        )

    async def cancel(self, request: InferenceRequest, **fields: Any) -> None:
        record = Cancellation(
            **{
                "request_id": request.request_id,
                "attempt": request.attempt,
                "tenant": request.tenant,
                "reason": "test",
                **fields,
            }
        )
        partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
        await self.producer.send_and_wait(topics.CANCELLATIONS, encode(record), partition=partition)

    def tokens(self, request: InferenceRequest) -> list[int]:
        return self.state(request).token_ids

    def state(self, request: InferenceRequest) -> StreamState:
        """The fold over what was read of the reply partition, for the attempt of `request`."""
        state = StreamState(
            request.request_id, attempt=request.attempt, token_ids=list(request.output_token_ids)
        )
        for seen in self.seen:
            if seen.topic != topics.TOKENS or seen.partition != request.reply_partition:
                continue
            if isinstance(seen.value, Tokens):
                for chunk in seen.value.chunks:
                    if chunk.request_id == request.request_id:
                        run = Run(seen.value.slot, seen.value.epoch)
                        state.apply_chunk(run, chunk, seen.timestamp)
            elif getattr(seen.value, "request_id", None) == request.request_id:
                state.apply(seen.value, seen.timestamp)
        return state

    async def end(self, request: InferenceRequest) -> tuple[Seen, Seen]:
        """The Completion of this attempt and its usage row, as soon as both are there."""

        def find() -> tuple[Seen, Seen] | None:
            ends = [s for s in self.seen if _is_about(s.value, Completion, request)]
            usages = [s for s in self.seen if _is_about(s.value, Usage, request)]
            return (ends[0], usages[0]) if ends and usages else None

        found: tuple[Seen, Seen] = await self.wait_for(find)
        return found

    async def _read(self) -> None:
        for records in (await self.consumer.getmany(timeout_ms=50)).values():
            for r in records:
                try:
                    value = decode(r.value)
                except CodecError:
                    value = None
                self.seen.append(Seen(r.topic, r.partition, r.offset, r.timestamp, value, list(r.headers)))


def _is_about(value: Any, kind: type[Any], request: InferenceRequest) -> bool:
    return isinstance(value, kind) and (value.request_id, value.attempt) == (
        request.request_id,
        request.attempt,
    )


@asynccontextmanager
async def fleet_client(bootstrap: str) -> AsyncIterator[FleetClient]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **PRODUCER_SETTINGS)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **CONSUMER_SETTINGS)
    await producer.start()
    await consumer.start()
    try:
        read = (topics.TOKENS, topics.USAGE, topics.EVENTS, topics.HEARTBEATS, topics.dlq(topics.PREFILL))
        counts = {spec.name: spec.partitions for spec in topics.topic_specs(LAYOUT)}
        places = await consumer.end_offsets([TopicPartition(t, p) for t in read for p in range(counts[t])])
        consumer.assign(list(places))
        for partition, end in places.items():
            consumer.seek(partition, end)
        yield FleetClient(producer, consumer)
    finally:
        await consumer.stop()
        await producer.stop()


_numbers = iter(range(1, 1 << 30))


def make_inference_request(
    *,
    prompt_len: int = 8,
    max_tokens: int = 16,
    attempt: int = 1,
    priority: int = 0,
    request_id: bytes | None = None,
    output_token_ids: list[int] | None = None,
    model: str = "simulated",
    tenant: str = "acme",
) -> InferenceRequest:
    return InferenceRequest(
        request_id=request_id or os.urandom(12) + next(_numbers).to_bytes(4, "big"),
        attempt=attempt,
        tenant=tenant,
        priority=priority,
        model=model,
        prompt_token_ids=[65] * prompt_len,
        output_token_ids=output_token_ids or [],
        sampling=SamplingParams(max_tokens=max_tokens),
        reply_partition=topics.partition(1, priority),
        owner_epoch=1,
        accepted_at=1_700_000_000_000,
        end_ms=60_000,
    )
