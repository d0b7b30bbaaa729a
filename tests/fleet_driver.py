"""A scripted admission process and a scripted worker, on real topics: the gateway's other side."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.codec import decode, encode
from schemas.fleet import CONSUMER_SETTINGS, HEARTBEAT_INTERVAL_S, PRODUCER_SETTINGS, join
from schemas.records import (
    Admitted,
    Cancellation,
    Completion,
    Dispatched,
    Heartbeat,
    InferenceRequest,
    Left,
    PartitionStatus,
    Rejected,
    Tenant,
    Tokens,
    Usage,
    WorkerStatus,
)
from schemas.token_records import TokenChunk
from schemas.topics import Layout

Script = Callable[["FleetDriver", InferenceRequest], Awaitable[None]]
WAIT_S = 60.0


def worker_status(model: str) -> WorkerStatus:
    return WorkerStatus(
        model=model,
        max_model_len=32_768,
        draining=False,
        num_blocks=1000,
        free_blocks=1000,
        block_size=16,
        max_num_seqs=64,
        num_running=0,
        num_waiting=[0, 0, 0],
        queued_prefill_tokens=0,
        mailbox_offsets=[0, 0, 0],
        step_age_ms=0,
        step_time_ms=1.0,
        prefill_tokens_per_s=1000.0,
        decode_tokens_per_s=100.0,
    )


class FleetDriver:
    """`script` answers each request in a task of its own; the queues hold what came."""

    def __init__(self, bootstrap_servers: str, layout: Layout, model: str = "simulated") -> None:
        self.script: Script = serve
        self.requests: asyncio.Queue[InferenceRequest] = asyncio.Queue()
        self.queue_cancellations: asyncio.Queue[Cancellation] = asyncio.Queue()
        self.cancellations: asyncio.Queue[Cancellation] = asyncio.Queue()
        self.usage: asyncio.Queue[Usage] = asyncio.Queue()
        self.heartbeating = {"admission": True, "worker": True}
        self.takeover_offsets: dict[int, int] = {}
        self.worker_epoch = 0
        self.offsets: dict[tuple[bytes, int], int] = {}
        self._read_ids: set[bytes] = set()
        self._layout = layout
        self._model = model
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, **PRODUCER_SETTINGS)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers, **CONSUMER_SETTINGS)
        self._read_offsets: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._producer.start()
        await self._consumer.start()
        hashed = range(self._layout.shards * topics.NUM_CLASSES)
        partitions = [
            TopicPartition(topic, p)
            for topic in (topics.REQUESTS, topics.CANCELLATIONS, topics.USAGE)
            for p in hashed
        ]
        places = await self._consumer.end_offsets(partitions)
        # With nothing awaited in between: a partition without a place is an error to the consumer.
        self._consumer.assign(partitions)
        for partition, offset in places.items():
            self._consumer.seek(partition, offset)
            if partition.topic == topics.REQUESTS:
                self.takeover_offsets[partition.partition] = offset
                self._read_offsets[partition.partition] = offset
        self.admission_epoch, self._admission_nonce = await join(self._producer, "admission", 0)
        await self.join_worker()
        self._go(self._read())
        self._go(self._beat())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._consumer.stop()
        await self._producer.stop()

    async def join_worker(self) -> None:
        """The worker's slot begins a new life."""
        self.worker_epoch, self._worker_nonce = await join(self._producer, "worker", 0, model=self._model)

    async def worker_left(self) -> None:
        await self._send(topics.EVENTS, 0, Left("worker", 0, self.worker_epoch, "killed by signal 9"))

    async def caught_up(self) -> None:
        """Returns when all that lies in the followed topics now is in the queues."""
        ends = await self._consumer.end_offsets(list(self._consumer.assignment()))
        async with asyncio.timeout(WAIT_S):
            for partition, end in ends.items():
                while await self._consumer.position(partition) < end:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    async def put_tenant(self, name: str, tenant: Tenant | None) -> None:
        value = None if tenant is None else encode(tenant)
        await self._producer.send_and_wait(topics.TENANTS, value, key=name.encode(), partition=0)

    async def admit(self, request: InferenceRequest) -> None:
        partition = topics.tenant_partition(request.tenant, request.priority, self._layout.shards)
        offset = self.offsets[request.request_id, request.attempt]
        await self._reply(
            request,
            Admitted(request.request_id, request.attempt, request.owner_epoch, partition, offset),
        )

    async def dispatch(
        self, request: InferenceRequest, epoch: int | None = None, max_tokens: int | None = None
    ) -> None:
        run = self.worker_epoch if epoch is None else epoch
        record = Dispatched(
            request_id=request.request_id,
            attempt=request.attempt,
            owner_epoch=request.owner_epoch,
            slot=0,
            epoch=run,
            model=request.model,
            requests_partition=topics.tenant_partition(request.tenant, request.priority, self._layout.shards),
            requests_offset=self.offsets[request.request_id, request.attempt],
            max_tokens=max_tokens,
        )
        await self._reply(request, record)

    async def reject(
        self, request: InferenceRequest, status: int, code: str, retry_after_ms: int | None = None
    ) -> None:
        record = Rejected(request.request_id, request.attempt, status, code, f"no: {code}", retry_after_ms)
        await self._reply(request, record)

    async def tokens(
        self,
        request: InferenceRequest,
        position: int,
        token_ids: list[int],
        finish_reason: str | None = None,
        epoch: int | None = None,
    ) -> None:
        chunk = TokenChunk(request.request_id, request.attempt, position, token_ids, finish_reason)
        run = self.worker_epoch if epoch is None else epoch
        await self._reply(request, Tokens.of(0, run, [chunk]))

    async def complete(
        self, request: InferenceRequest, count: int, finish_reason: str, message: str | None = None
    ) -> None:
        record = Completion(
            request_id=request.request_id,
            attempt=request.attempt,
            slot=0,
            epoch=self.worker_epoch,
            input_tokens=len(request.prompt_token_ids),
            cached_tokens=0,
            output_tokens=count,
            finish_reason=finish_reason,
            message=message,
        )
        await self._reply(request, record)

    async def next_request(self) -> InferenceRequest:
        return await asyncio.wait_for(self.requests.get(), WAIT_S)

    async def next_cancellation(self) -> Cancellation:
        return await asyncio.wait_for(self.cancellations.get(), WAIT_S)

    async def next_usage(self) -> Usage:
        return await asyncio.wait_for(self.usage.get(), WAIT_S)

    async def _reply(self, request: InferenceRequest, record: object) -> None:
        await self._send(topics.TOKENS, request.reply_partition, record)

    async def _send(self, topic: str, partition: int, record: object) -> None:
        await self._producer.send_and_wait(topic, encode(record), partition=partition)

    async def _read(self) -> None:
        while True:
            for partition, messages in (await self._consumer.getmany(timeout_ms=500)).items():
                for message in messages:
                    self._on_message(partition, message.offset, decode(message.value))

    def _on_message(self, partition: TopicPartition, offset: int, record: object) -> None:
        match record:
            case InferenceRequest():
                self.offsets[record.request_id, record.attempt] = offset
                self._read_ids.add(record.request_id)
                self._read_offsets[partition.partition] = offset + 1
                self.requests.put_nowait(record)
                self._go(self._run_script(record))
            case Cancellation(request_id=request_id) if request_id not in self._read_ids:
                pass  # of an earlier test on this broker: successors stop what its requests may still run
            case Cancellation() if partition.topic == topics.REQUESTS:
                self.queue_cancellations.put_nowait(record)
            case Cancellation():
                self.cancellations.put_nowait(record)
            case Usage():
                self.usage.put_nowait(record)

    async def _run_script(self, request: InferenceRequest) -> None:
        await self.script(self, request)

    async def _beat(self) -> None:
        while True:
            partitions = [
                PartitionStatus(p, self.takeover_offsets[p], read, [])
                for p, read in self._read_offsets.items()
            ]
            admission = Heartbeat(
                "admission", 0, self.admission_epoch, self._admission_nonce, partitions=partitions
            )
            worker = Heartbeat(
                "worker", 0, self.worker_epoch, self._worker_nonce, worker=worker_status(self._model)
            )
            for heartbeat in (admission, worker):
                if self.heartbeating[heartbeat.role]:
                    await self._send(topics.HEARTBEATS, 0, heartbeat)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(driver: FleetDriver, request: InferenceRequest) -> None:
    """Dispatches, echoes the prompt's last bytes up to max_tokens, completes."""
    await driver.dispatch(request)
    count = request.sampling.max_tokens
    text = bytes(i for i in request.prompt_token_ids if i < 256)
    token_ids = list((text * (count // len(text) + 1))[:count])
    for i, token_id in enumerate(token_ids):
        await driver.tokens(request, i, [token_id], "length" if i + 1 == count else None)
    await driver.complete(request, count, "length")


async def silent(driver: FleetDriver, request: InferenceRequest) -> None:
    """Admission lets the request lie."""


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what no event tells. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
