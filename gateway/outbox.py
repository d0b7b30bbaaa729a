"""All that a gateway writes to Kafka. Nothing given to `put` is lost while the process lives.

Requests, cancellations and replies share a producer, so that a cancel lies behind its request; usage and
heartbeats have their own (one batch per partition is in flight at a time).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from gateway.actions import Action, Announce, Bill, Cancel, Reply, Restated, SendRequest
from gateway.owned_request import OwnedRequest
from schemas import topics
from schemas.codec import encode
from schemas.fleet import HEARTBEAT_PRODUCER_SETTINGS, PRODUCER_SETTINGS
from schemas.headers import Headers, ReplyTo, reply_headers
from schemas.kafka_login import client_settings
from schemas.lasting_producer import lasting
from schemas.record_size import is_too_large
from schemas.records import Described, Heartbeat, InferenceRequest
from schemas.stop_client import stop_client

log = logging.getLogger(__name__)

_SEND_S = 5.0
_STOP_S = 5.0
_RETRY_S = 0.2
_START_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Record:
    topic: str
    partition: int
    value: bytes
    headers: Headers


class Outbox:
    """`on_sent(owned, offset)` is called when a request sent again has been acked."""

    def __init__(self, bootstrap_servers: str, on_sent: Callable[[OwnedRequest, int], None]) -> None:
        self.requests = lasting(AIOKafkaProducer(**client_settings(bootstrap_servers), **PRODUCER_SETTINGS))
        self._usage = lasting(AIOKafkaProducer(**client_settings(bootstrap_servers), **PRODUCER_SETTINGS))
        self._heartbeats = AIOKafkaProducer(
            **client_settings(bootstrap_servers), **HEARTBEAT_PRODUCER_SETTINGS
        )
        self._on_sent = on_sent
        self._queue: deque[Action] = deque()
        self._wake = asyncio.Event()
        self._acked = asyncio.Event()
        self._unacked = 0

    async def start(self) -> None:
        """Waits for Kafka; the caller sets a deadline."""
        for producer in (self.requests, self._usage, self._heartbeats):
            await _start(producer)

    async def stop(self) -> None:
        """Within seconds even when the broker is away; then what is not acked may be lost, and is logged."""
        if self._queue or self._unacked:
            log.error("stopping with records unsent", extra={"count": len(self._queue) + self._unacked})
        for producer in (self._heartbeats, self._usage, self.requests):
            await stop_client(producer, _STOP_S)

    def put(self, actions: Iterable[Action]) -> None:
        """Queues what the owner wants done; returns at once."""
        self._queue.extend(actions)
        if self._queue:
            self._wake.set()

    async def send_request(self, owned: OwnedRequest, timeout_s: float) -> int:
        """Appends the request; returns its offset when the broker has it. Raises TimeoutError, KafkaError.

        After an error the record may still arrive.
        """
        async with asyncio.timeout(timeout_s):
            record = _request_record(owned)
            acked = await self.requests.send(
                record.topic, record.value, partition=record.partition, headers=record.headers
            )
            offset: int = (await acked).offset
            return offset

    async def send_description(self, description: Described, reply_partition: int, timeout_s: float) -> None:
        """Returns when the broker has it. Raises TimeoutError, KafkaError; it may still arrive then."""
        async with asyncio.timeout(timeout_s):
            acked = await self.requests.send(topics.TOKENS, encode(description), partition=reply_partition)
            await acked

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Raises TimeoutError, KafkaError. A heartbeat that is not acked is of no interest."""
        async with asyncio.timeout(1.0):
            acked = await self._heartbeats.send(topics.HEARTBEATS, encode(heartbeat), partition=0)
        acked.add_done_callback(_forget)

    async def run(self) -> None:
        """Sends what was put, in order, for ever."""
        while True:
            while self._queue:
                action = self._queue[0]
                try:
                    async with asyncio.timeout(_SEND_S):
                        await self._send(action)
                except (TimeoutError, KafkaError) as e:
                    if _is_for_good(action, e):
                        self._queue.popleft()
                        self._acked.set()
                        continue
                    # The broker is away: send() did not take it, so the order still holds on the next try.
                    log.warning("Kafka does not take records", extra={"error": repr(e)})
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._queue.popleft()
                self._acked.set()
            self._wake.clear()
            await self._wake.wait()

    async def drained(self) -> None:
        """Returns when all that was put is acked. The caller sets a deadline."""
        while self._queue or self._unacked:
            self._acked.clear()
            await self._acked.wait()

    async def _send(self, action: Action) -> None:
        match action:
            case SendRequest(owned):
                if not owned.state.ended:
                    await self._append(self.requests, _request_record(owned), action)
            case Reply(record, partition, trace):
                headers = reply_headers(ReplyTo(record.request_id, record.attempt, partition), trace)
                await self._append(
                    self.requests, _Record(topics.TOKENS, partition, encode(record), headers), action
                )
            case Announce(word, partition):
                await self._append(self.requests, _Record(topics.TOKENS, partition, encode(word), []), action)
            case Cancel(cancellation, partition, behind_request):
                value = encode(cancellation)
                await self._append(self.requests, _Record(topics.CANCELLATIONS, partition, value, []), action)
                if behind_request:
                    await self._append(self.requests, _Record(topics.REQUESTS, partition, value, []), action)
            case Restated(restate, partition):
                value = encode(restate)
                await self._append(self.requests, _Record(topics.REQUESTS, partition, value, []), action)
            case Bill(usage, partition, headers):
                await self._append(
                    self._usage, _Record(topics.USAGE, partition, encode(usage), headers), action
                )

    async def _append(self, producer: AIOKafkaProducer, record: _Record, action: Action) -> None:
        acked = await producer.send(
            record.topic, record.value, partition=record.partition, headers=record.headers
        )
        self._unacked += 1

        def again() -> None:
            self._unacked -= 1
            self.put([action])

        def done(future: "asyncio.Future[object]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                if _is_for_good(action, error):
                    self._unacked -= 1
                    self._acked.set()
                    return
                # All records here may come twice: the fold, the workers and the ledger count them once.
                log.error(
                    "Kafka lost a record; sent again", extra={"topic": record.topic, "error": repr(error)}
                )
                # Behind a pause: what is refused once may be refused for long.
                asyncio.get_running_loop().call_later(_RETRY_S, again)
                return
            self._unacked -= 1
            self._acked.set()
            if not future.cancelled() and isinstance(action, SendRequest):
                self._on_sent(action.owned, future.result().offset)  # type: ignore[attr-defined]

        acked.add_done_callback(done)


async def _start(producer: AIOKafkaProducer) -> None:
    while True:
        try:
            await producer.start()
            return
        except KafkaError as e:
            log.info("waiting for Kafka", extra={"error": repr(e)})
            await asyncio.sleep(_START_RETRY_S)


def _is_for_good(action: Action, error: BaseException) -> bool:
    """Whether another try of a request is of no use: its owner ends it."""
    if not isinstance(action, SendRequest) or not is_too_large(error):
        return False
    log.error("a request is too large", extra={"request_id": action.owned.request.request_id})
    action.owned.oversized = True
    return True


def _request_record(owned: OwnedRequest) -> _Record:
    request: InferenceRequest = owned.request
    to = ReplyTo(request.request_id, request.attempt, request.reply_partition)
    return _Record(topics.REQUESTS, owned.partition, encode(request), reply_headers(to, owned.traceparent))


def _forget(future: "asyncio.Future[object]") -> None:
    if not future.cancelled():
        future.exception()
