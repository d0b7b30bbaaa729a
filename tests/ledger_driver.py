"""A scripted admission and worker on real Kafka topics: the ledger's other side."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.codec import decode, default_codec, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS, join, publish_schemas
from schemas.records import (
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
)
from schemas.token_records import TokenChunk

Serve = Callable[["LedgerDriver", InferenceRequest, int], Any]


class LedgerDriver:
    """Reads the class-2 partitions of inference.requests and hands each request to `serve`.

    `serve(driver, request, offset)` is a coroutine function; `requests` keeps all that were seen.
    """

    def __init__(self, bootstrap: str, layout: topics.Layout, serve: Serve, worker_slot: int = 0) -> None:
        self.layout, self.serve, self.slot = layout, serve, worker_slot
        self.requests: list[InferenceRequest] = []
        self.cancellations: list[Cancellation] = []
        self.takeover: dict[int, int] = {}
        self.epoch = 0
        self._producer: Any = AIOKafkaProducer(bootstrap_servers=bootstrap, **PRODUCER_SETTINGS)
        self._consumer: Any = AIOKafkaConsumer(bootstrap_servers=bootstrap, **CONSUMER_SETTINGS)
        self._stops: list[Callable[[], Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._lives: dict[tuple[str, int], tuple[int, bytes]] = {}

    async def __aenter__(self) -> "LedgerDriver":
        await self._producer.start()
        await self._consumer.start()
        await publish_schemas(self._producer, default_codec().schemas())
        self._tps = [
            TopicPartition(topics.REQUESTS, topics.partition(shard, 2)) for shard in range(self.layout.shards)
        ]
        cancels = [TopicPartition(topics.CANCELLATIONS, tp.partition) for tp in self._tps]
        ends = await self._consumer.end_offsets([*self._tps, *cancels])
        # Nothing may run between these lines: a partition without a place is an error to the consumer.
        self._consumer.assign([*self._tps, *cancels])
        for tp, end in ends.items():
            self._consumer.seek(tp, end)
        self.takeover = {tp.partition: ends[tp] for tp in self._tps}
        self._lives["admission", 0] = await join(self._producer, "admission", 0)
        await self.join_worker()
        self._spawn(self._beat())
        self._spawn(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stop in [*self._stops, self._consumer.stop, self._producer.stop]:
            await stop()

    async def join_worker(self) -> None:
        """A new life of the worker's slot."""
        self._lives["worker", self.slot] = await join(self._producer, "worker", self.slot)
        self.epoch = self._lives["worker", self.slot][0]

    async def leave_worker(self) -> None:
        await self.send(topics.EVENTS, 0, Left("worker", self.slot, self.epoch, "test"))

    async def send(self, topic: str, partition: int, record: Any, key: bytes | None = None) -> Any:
        return await self._producer.send_and_wait(topic, encode(record), key=key, partition=partition)

    async def put_tenant(self, tenant: Tenant) -> None:
        await self._producer.send_and_wait(
            topics.TENANTS, encode(tenant), key=tenant.name.encode(), partition=0
        )

    def on_exit(self, stop: Callable[[], Any]) -> None:
        self._stops.append(stop)

    async def send_raw(self, topic: str, value: bytes, partition: int = 0) -> Any:
        return await self._producer.send_and_wait(topic, value, partition=partition)

    async def reply(self, request: InferenceRequest, record: Any) -> None:
        await self.send(topics.TOKENS, request.reply_partition, record)

    async def dispatched(self, request: InferenceRequest) -> None:
        await self.reply(
            request,
            Dispatched(
                request.request_id, request.attempt, request.owner_epoch, self.slot, self.epoch, request.model
            ),
        )

    async def tokens(self, request: InferenceRequest, position: int, ids: list[int]) -> None:
        chunk = TokenChunk(request.request_id, request.attempt, position, ids)
        await self.reply(request, Tokens.of(self.slot, self.epoch, [chunk]))

    async def complete(self, request: InferenceRequest, count: int, reason: str = "length") -> None:
        """Usage first, then Completion, as a worker does."""
        prompt = len(request.prompt_token_ids)
        usage = Usage(
            request_id=request.request_id,
            attempt=request.attempt,
            sealed=False,
            tenant=request.tenant,
            priority=request.priority,
            model=request.model,
            input_tokens=prompt,
            cached_tokens=0,
            output_tokens=count,
            finish_reason=reason,
            accepted_at=request.accepted_at,
            ended_at=request.accepted_at + 1,
            slot=self.slot,
            epoch=self.epoch,
        )
        partition = topics.tenant_partition(request.tenant, request.priority, self.layout.shards)
        await self.send(topics.USAGE, partition, usage)
        await self.reply(
            request,
            Completion(request.request_id, request.attempt, self.slot, self.epoch, prompt, 0, count, reason),
        )

    async def reject(self, request: InferenceRequest, status: int, code: str, retry_after_ms: int) -> None:
        await self.reply(
            request, Rejected(request.request_id, request.attempt, status, code, code, retry_after_ms)
        )

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _beat(self) -> None:
        while True:
            for (role, slot), (epoch, nonce) in self._lives.items():
                statuses = []
                if role == "admission":
                    statuses = [
                        PartitionStatus(p, takeover, await self._position(p), [])
                        for p, takeover in self.takeover.items()
                    ]
                beat = Heartbeat(role, slot, epoch, nonce, partitions=statuses)
                await self._producer.send(topics.HEARTBEATS, encode(beat), partition=0)
            await asyncio.sleep(0.1)

    async def _position(self, partition: int) -> int:
        position: int = await self._consumer.position(TopicPartition(topics.REQUESTS, partition))
        return position

    async def _read(self) -> None:
        while True:
            for records in (await self._consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    request = decode(record.value)
                    if isinstance(request, Cancellation) and record.topic == topics.CANCELLATIONS:
                        self.cancellations.append(request)
                    if isinstance(request, InferenceRequest):
                        self.requests.append(request)
                        self._spawn(self.serve(self, request, record.offset))


async def echo(driver: LedgerDriver, request: InferenceRequest, offset: int) -> None:
    """Serves a request of the simulated model: the output is "abc…", `max_tokens` long."""
    done = len(request.output_token_ids)
    await driver.dispatched(request)
    ids = [97 + i % 26 for i in range(done, request.sampling.max_tokens)]
    half = len(ids) // 2
    await driver.tokens(request, done, ids[:half])
    await driver.tokens(request, done + half, ids[half:])
    await driver.complete(request, request.sampling.max_tokens)
