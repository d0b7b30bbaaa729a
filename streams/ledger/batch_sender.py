"""Carries out what a batch shard decides: requests, its own records, cancellations and seals."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from schemas import topics
from schemas.codec import encode
from schemas.headers import Headers, ReplyTo, reply_headers
from schemas.priority import PriorityClass
from schemas.record_size import is_too_large
from schemas.records import InferenceRequest, Retry, Usage
from streams.ledger.batch_actions import Action, Append, CancelRun, Restated, Seal, SendRequest
from streams.ledger.metrics import BATCH_RETRIES

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30.0


class BatchSender:
    """`producer` is started. `on_sent(request_id, attempt, offset)` is called when a request is acked,
    `on_too_large(request_id, attempt)` when its topic takes no record so large."""

    def __init__(
        self,
        producer: Any,
        reply_partition: int,
        shards: int,
        on_sent: Callable[[bytes, int, int], None],
        on_too_large: Callable[[bytes, int], None],
    ) -> None:
        self._producer, self._reply_partition, self._shards = producer, reply_partition, shards
        self._on_sent, self._on_too_large = on_sent, on_too_large
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    async def execute(self, actions: Iterable[Action]) -> None:
        """Hands them to the producer in order; acks are looked at when they come."""
        for action in actions:
            match action:
                case SendRequest(request):
                    await self._send_request(request)
                case Append(record):
                    if isinstance(record, Retry):
                        BATCH_RETRIES.inc()
                        log.warning(
                            "batch request retried",
                            extra={"request_id": record.request_id, "reason": record.reason},
                        )
                    future = await self._send(topics.TOKENS, self._reply_partition, encode(record))
                    future.add_done_callback(self._check)
                case Restated(record):
                    # The tenants of the shard hash to it: their requests lie in the partition of its number.
                    future = await self._send(topics.REQUESTS, self._reply_partition, encode(record))
                    future.add_done_callback(self._check)
                case Seal(usage):
                    partition = topics.tenant_partition(usage.tenant, usage.priority, self._shards)
                    future = await self._send(topics.USAGE, partition, encode(usage))
                    future.add_done_callback(self._check)
                case CancelRun(record, behind_request):
                    partition = topics.tenant_partition(record.tenant, PriorityClass.BATCH, self._shards)
                    for topic in (topics.CANCELLATIONS, *([topics.REQUESTS] if behind_request else [])):
                        future = await self._send(topic, partition, encode(record))
                        future.add_done_callback(self._check)

    async def seal(self, usages: Iterable[Usage]) -> None:
        """Returns when the broker has acked all of them."""
        async with asyncio.timeout(SEND_TIMEOUT_S):
            for usage in usages:
                partition = topics.tenant_partition(usage.tenant, usage.priority, self._shards)
                await self._producer.send_and_wait(topics.USAGE, encode(usage), partition=partition)

    async def watch(self) -> None:
        """Raises RuntimeError when a record was not acked."""
        await self._failed.wait()
        raise RuntimeError("a record could not be sent") from self._error

    async def _send_request(self, request: InferenceRequest) -> None:
        rid, attempt = request.request_id, request.attempt

        def sent(done: Any) -> None:
            if not done.cancelled() and (error := done.exception()) is not None and is_too_large(error):
                self._on_too_large(rid, attempt)
            elif self._check(done):
                self._on_sent(rid, attempt, done.result().offset)

        partition = topics.tenant_partition(request.tenant, request.priority, self._shards)
        headers = reply_headers(ReplyTo(rid, attempt, request.reply_partition))
        try:
            future = await self._send(topics.REQUESTS, partition, encode(request), headers)
        except Exception as error:
            if not is_too_large(error):
                raise
            self._on_too_large(rid, attempt)
        else:
            future.add_done_callback(sent)

    async def _send(self, topic: str, partition: int, value: bytes, headers: Headers | None = None) -> Any:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            return await self._producer.send(topic, value, partition=partition, headers=headers)

    def _check(self, done: Any) -> bool:
        if done.cancelled():
            return False
        if (error := done.exception()) is not None:
            self._error = error
            self._failed.set()
        return error is None
