"""Owners and one worker for the benchmark of admission: they write and read the log, and compute nothing."""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.catalog import SIMULATED_MODEL
from schemas.clock import epoch_ms
from schemas.codec import HEADER_BYTES, decode, default_codec, encode
from schemas.fleet import (
    CONSUMER_SETTINGS,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_PRODUCER_SETTINGS,
    PRODUCER_SETTINGS,
    join,
    publish_schemas,
)
from schemas.headers import ReplyTo, reply_headers, reply_to
from schemas.kafka_login import client_settings
from schemas.priority import PriorityClass
from schemas.records import (
    Admitted,
    ClassLimits,
    Heartbeat,
    InferenceRequest,
    SamplingParams,
    Tenant,
    Usage,
    WorkerStatus,
)
from schemas.topics import Layout

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 16
_PROMPT = list(range(1_000, 1_000 + PROMPT_TOKENS))
_BLOCKS = 1 << 20
_NO_BOUND = 10**12


def tenant_name(number: int) -> str:
    return f"tenant-{number}"


class BenchFleet:
    """`dispatched_at`: by request id, when its Dispatch was read (s of time.perf_counter).

    The worker ends all that it is given, but for class batch: of these it holds what it has until, with
    `ends_for_queued`, admission has queued another one: `num_queued` of them so far.
    """

    def __init__(self, kafka: str, layout: Layout) -> None:
        self.layout = layout
        self.max_num_seqs = 256
        self.ends_for_queued = False
        self.num_queued = 0
        self.held: deque[InferenceRequest] = deque()
        self.dispatched_at: dict[bytes, float] = {}
        self._requests: dict[bytes, InferenceRequest] = {}
        self._read = [0] * topics.NUM_CLASSES
        self._epoch = 0
        self._to_end = 0
        self._prompt = b""
        self._moved = asyncio.Event()
        self.producer = AIOKafkaProducer(**client_settings(kafka), **PRODUCER_SETTINGS)
        self._heartbeats = AIOKafkaProducer(**client_settings(kafka), **HEARTBEAT_PRODUCER_SETTINGS)
        self._mailbox = AIOKafkaConsumer(**client_settings(kafka), **CONSUMER_SETTINGS)
        self._replies = AIOKafkaConsumer(**client_settings(kafka), **CONSUMER_SETTINGS)

    async def put_tenants(self, numbers: Sequence[int]) -> None:
        """With limits that nobody reaches, so that they are counted."""
        limits = [
            ClassLimits(p, tokens_per_minute=_NO_BOUND, requests_per_minute=_NO_BOUND) for p in PriorityClass
        ]
        for number in numbers:
            tenant = Tenant(tenant_name(number), 0, [], limits)
            await self.producer.send(topics.TENANTS, encode(tenant), key=tenant.name.encode(), partition=0)
        await self.producer.flush()

    async def send(self, tenant: int, priority: PriorityClass) -> bytes:
        """Appends a request, acked or not; its id."""
        request = InferenceRequest(
            request_id=os.urandom(16),
            attempt=1,
            tenant=tenant_name(tenant),
            priority=priority,
            model=SIMULATED_MODEL,
            prompt_token_ids=[],
            output_token_ids=[],
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS),
            reply_partition=priority,
            owner_epoch=1,
            accepted_at=epoch_ms(),
            end_ms=3_600_000,
        )
        self._requests[request.request_id] = request
        to = ReplyTo(request.request_id, 1, request.reply_partition)
        partition = topics.tenant_partition(request.tenant, priority, self.layout.shards)
        await self.producer.send(
            topics.REQUESTS, self._with_prompt(request), partition=partition, headers=reply_headers(to)
        )
        return request.request_id

    def _with_prompt(self, request: InferenceRequest) -> bytes:
        """The record with the prompt that all have, which is encoded once: this process shares the processors
        with the one that is measured."""
        record = encode(request)
        # Before the prompt are 16 bytes, two texts, and two numbers, of a byte each as the texts' lengths.
        at = HEADER_BYTES + 16 + 2 + 1 + len(request.tenant) + 1 + len(request.model)
        if not self._prompt:
            whole = encode(replace(request, prompt_token_ids=_PROMPT))
            self._prompt = whole[at : len(whole) - len(record) + at + 1]
            if record[:at] + self._prompt + record[at + 1 :] != whole:
                raise RuntimeError("a request's fields are not in the order that is expected here")
        return record[:at] + self._prompt + record[at + 1 :]

    def has_dispatched(self, count: int) -> bool:
        """Whether so many were dispatched in all."""
        return len(self.dispatched_at) >= count

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Returns when it holds. Raises TimeoutError."""
        if condition():
            return
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def _end_some(self) -> None:
        while self._to_end and self.held:
            self._to_end -= 1
            await self._end(self.held.popleft())

    async def _end(self, request: InferenceRequest) -> None:
        now = epoch_ms()
        usage = Usage(
            request_id=request.request_id,
            attempt=1,
            sealed=False,
            tenant=request.tenant,
            priority=request.priority,
            model=request.model,
            input_tokens=PROMPT_TOKENS,
            cached_tokens=0,
            output_tokens=OUTPUT_TOKENS,
            finish_reason="length",
            accepted_at=request.accepted_at,
            ended_at=now,
            slot=0,
            epoch=self._epoch,
            first_token_ms=5,
        )
        partition = topics.tenant_partition(request.tenant, request.priority, self.layout.shards)
        await self.producer.send(topics.USAGE, encode(usage), partition=partition)

    async def _read_mailbox(self) -> None:
        while True:
            for partition, records in (await self._mailbox.getmany(timeout_ms=1_000)).items():
                now = time.perf_counter()
                for record in records:
                    to = reply_to(record.headers)
                    request = None if to is None else self._requests.pop(to.request_id, None)
                    if request is None:
                        continue  # another run's of this benchmark
                    self.dispatched_at[request.request_id] = now
                    if request.priority == PriorityClass.BATCH:
                        self.held.append(request)
                    else:
                        await self._end(request)
                self._read[partition.partition] = records[-1].offset + 1
            await self._end_some()
            self._moved.set()

    async def _read_replies(self) -> None:
        """Of class batch: what waits is told so."""
        while True:
            for records in (await self._replies.getmany(timeout_ms=1_000)).values():
                count = sum(isinstance(decode(record.value), Admitted) for record in records)
                self.num_queued += count
                if self.ends_for_queued:
                    self._to_end += count
            await self._end_some()
            self._moved.set()

    async def _beat(self, nonce: bytes) -> None:
        while True:
            status = WorkerStatus(
                model=SIMULATED_MODEL,
                max_model_len=32_768,
                draining=False,
                num_blocks=_BLOCKS,
                free_blocks=_BLOCKS - 8 * len(self.held),
                block_size=16,
                max_num_seqs=self.max_num_seqs,
                num_running=len(self.held),
                num_waiting=[0, 0, 0],
                queued_prefill_tokens=0,
                mailbox_offsets=list(self._read),
                step_age_ms=0,
                step_time_ms=5.0,
                # So fast that prompts need not wait for it.
                prefill_tokens_per_s=1e7,
                decode_tokens_per_s=1e5,
                canary="ok",
            )
            heartbeat = Heartbeat("worker", 0, self._epoch, nonce, worker=status)
            await self._heartbeats.send_and_wait(topics.HEARTBEATS, encode(heartbeat), partition=0)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Joins as worker 0 and lives; what ends one of its tasks ends the block."""
        clients = (self.producer, self._heartbeats, self._mailbox, self._replies)
        started = []
        try:
            for client in clients:
                await client.start()
                started.append(client)
            await publish_schemas(self.producer, default_codec().schemas())
            mailboxes = [TopicPartition(topics.PREFILL, topics.partition(0, p)) for p in PriorityClass]
            ends = await self._mailbox.end_offsets(mailboxes)
            self._mailbox.assign(mailboxes)
            for mailbox, end in ends.items():
                self._mailbox.seek(mailbox, end)
                self._read[mailbox.partition] = end
            replies = TopicPartition(topics.TOKENS, PriorityClass.BATCH)
            end = (await self._replies.end_offsets([replies]))[replies]
            self._replies.assign([replies])
            self._replies.seek(replies, end)
            self._epoch, nonce = await join(self.producer, "worker", 0, model=SIMULATED_MODEL)
            async with asyncio.TaskGroup() as group:
                works = (self._read_mailbox(), self._read_replies(), self._beat(nonce))
                tasks = [group.create_task(work) for work in works]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            for client in started:
                await client.stop()
