"""Carries out actions: a Dispatch is acked before the owner hears Dispatched."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from schemas import topics
from schemas.codec import encode
from schemas.headers import Headers, reply_headers
from schemas.record_size import is_too_large
from schemas.records import Rejected, Shedding, Unpaired
from streams.admission.actions import (
    Action,
    Announce,
    AnnouncePool,
    Assign,
    DeadLetter,
    NoteKey,
    Reply,
    reply_to,
)
from streams.admission.admission import Admission
from streams.admission.metrics import Metrics
from streams.admission.router import PoolChange
from streams.admission.shedding import LevelChange
from streams.admission.splice import encode_dispatch
from streams.admission.waiting import wait_until

log = logging.getLogger(__name__)

# `send` blocks while the broker is away and its buffer is full. Then it is asked again, in the same order.
SEND_TIMEOUT_S = 5.0
_MAX_TOGETHER = 256


class Producer(Protocol):
    """The part of AIOKafkaProducer that is needed."""

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers | None = None,
    ) -> "asyncio.Future[Any]": ...


class Dispatcher:
    """`put` never waits; `run` sends in order. `clock` gives ms of the epoch, `own_run` (slot, epoch)."""

    def __init__(
        self,
        producer: Producer,
        admission: Admission,
        metrics: Metrics,
        clock: Callable[[], int],
        own_run: Callable[[], tuple[int, int]],
    ) -> None:
        self._producer = producer
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._own_run = own_run
        self._actions: deque[Action] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sending = False
        self._unacked: dict[asyncio.Future[Any], int] = {}

    def put(self, actions: Iterable[Action]) -> None:
        self._actions.extend(actions)
        if self._actions:
            self._idle.clear()
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._sending = True
            while self._actions:
                await self._carry_out_some()
            self._sending = False
            self._note_idle()

    async def _carry_out_some(self) -> None:
        """Those that wait, in order, as far as the producer takes them. A deadline for each costs 9 µs."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                for _ in range(min(len(self._actions), _MAX_TOGETHER)):
                    await self._carry_out(self._actions[0])
                    self._actions.popleft()
        except TimeoutError:
            # Of the first the producer has taken nothing.
            self._held_up(self._actions[0])

    def _held_up(self, action: Action) -> None:
        """It is tried again, but for what is to be dispatched by now."""
        if isinstance(action, Assign) and self._clock() >= wait_until(
            self._admission.policy, action.dispatch.request
        ):
            self._actions.popleft()
            self._failed(action, TimeoutError())
        else:
            log.warning("Kafka does not take records", extra={"action": type(action).__name__})

    async def drain(self) -> None:
        """Returns when all that was put is acked. The caller sets a deadline."""
        await self._idle.wait()

    def oldest_unacked_s(self) -> float:
        """Age of the oldest send that the broker has not acked, on the log's clock: while the broker is away
        nothing ages."""
        first = next(iter(self._unacked.values()), None)
        return 0.0 if first is None else (self._admission.fleet.clock.now_ms - first) / 1000

    async def _carry_out(self, action: Action) -> None:
        match action:
            case Assign():
                await self._assign(action)
            case Reply():
                await self._reply(action)
            case NoteKey():
                await self._note(action)
            case DeadLetter():
                await self._bury(action)
            case Announce():
                await self._announce(action.change)
            case AnnouncePool():
                await self._announce_pool(action.change)

    async def _assign(self, assign: Assign) -> None:
        dispatch = assign.dispatch
        mailbox = topics.partition(dispatch.slot, dispatch.request.priority)
        to = reply_to(dispatch.request)
        began = time.perf_counter()
        try:
            if assign.keyed is not None:
                # 1. Whoever holds the partition next knows that this request runs for its key.
                noted = partial(self._noted, assign)
                await self._send(noted, topics.IDEMPOTENCY, encode(assign.keyed), assign.partition, [])
                return
            # 2. The Dispatch.
            value = encode_dispatch(dispatch, assign.record)
            headers = reply_headers(to, assign.traceparent)
            acked = partial(self._acked, assign, began)
            await self._send(acked, topics.PREFILL, value, mailbox, headers)
        except Exception as error:
            self._failed(assign, error)
            return
        self._metrics.dispatches[dispatch.request.priority].inc()
        self._metrics.queue_seconds[dispatch.request.priority].observe(assign.queued_ms / 1000)

    async def _reply(self, reply: Reply) -> None:
        record, to = reply.record, reply.to
        if isinstance(record, Rejected):
            self._metrics.rejected(record.status, record.code)
        try:
            headers = reply_headers(to, reply.traceparent)
            replied = partial(self._replied, reply)
            await self._send(replied, topics.TOKENS, encode(record), to.reply_partition, headers)
        except Exception as error:
            self._lost(reply, error)

    async def _note(self, note: NoteKey) -> None:
        try:
            noted = partial(self._key_noted, note)
            await self._send(noted, topics.IDEMPOTENCY, encode(note.keyed), note.partition, [])
        except Exception as error:
            self._key_lost(note, error)

    async def _bury(self, letter: DeadLetter) -> None:
        topic = topics.dlq(topics.REQUESTS)
        try:
            await self._send(self._buried, topic, letter.value, letter.partition, letter.headers, letter.key)
        except Exception as error:
            log.error("a record of partition %d could not go to %s: %r", letter.partition, topic, error)

    async def _announce(self, change: LevelChange) -> None:
        log.warning(
            "model %s: shedding level %s (was %s)", change.model, change.level.label, change.before.label
        )
        run = self._own_run()
        await self._tell(
            Shedding(change.model, change.level, change.before, change.wait_ms, change.kv_use, *run)
        )

    async def _announce_pool(self, change: PoolChange) -> None:
        what = "workers lack" if change.is_missing else "no worker lacks any more"
        log.warning("model %s: %s a partner of role %s", change.model, what, change.role)
        await self._tell(Unpaired(change.model, change.role, change.is_missing, *self._own_run()))

    async def _tell(self, event: Shedding | Unpaired) -> None:
        try:
            await self._send(self._announced, topics.EVENTS, encode(event), 0, [])
        except Exception as error:
            log.error("%s could not be announced: %r", event, error)

    async def _send(
        self,
        then: "Callable[[asyncio.Future[Any]], None]",
        topic: str,
        value: bytes | None,
        partition: int,
        headers: Headers,
        key: bytes | None = None,
    ) -> None:
        """Returns when the producer has taken it; `then` gets the future of its ack when that is done."""
        future = await self._producer.send(topic, value, key, partition, headers=headers)
        self._unacked[future] = self._admission.fleet.clock.now_ms
        future.add_done_callback(partial(self._done, then))

    def _done(self, then: "Callable[[asyncio.Future[Any]], None]", future: "asyncio.Future[Any]") -> None:
        self._unacked.pop(future, None)
        then(future)  # may put more
        self._note_idle()

    def _note_idle(self) -> None:
        if not (self._actions or self._sending or self._unacked):
            self._idle.set()

    def _noted(self, assign: Assign, future: "asyncio.Future[Any]") -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._failed(assign, error)
            return
        assign.keyed = None
        self.put([assign])

    def _acked(self, assign: Assign, began: float, future: "asyncio.Future[Any]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._failed(assign, error)
            return
        self._metrics.ack_seconds.observe(time.perf_counter() - began)
        self.put(self._admission.on_dispatched(assign, future.result().offset))

    def _failed(self, assign: Assign, error: BaseException) -> None:
        reason = type(error).__name__
        log.error(
            "dispatch failed: %r",
            error,
            extra={"request_id": assign.dispatch.request.request_id, "worker_slot": assign.dispatch.slot},
        )
        too_large = is_too_large(error)
        self.put(self._admission.on_dispatch_failed(assign, reason, self._clock(), too_large=too_large))

    def _replied(self, reply: Reply, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._lost(reply, error)

    def _key_noted(self, note: NoteKey, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._key_lost(note, error)

    @staticmethod
    def _key_lost(note: NoteKey, error: BaseException) -> None:
        # After a takeover the key would lead to that request again; who is led there has it freed once more.
        log.error(
            "a key could not be freed for later holders of partition %d: %r",
            note.partition,
            error,
            extra={"request_id": note.keyed.request_id},
        )

    @staticmethod
    def _buried(future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("a record could not go to the dead letters: %r", error)

    @staticmethod
    def _announced(future: "asyncio.Future[Any]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("a change could not be announced: %r", error)

    @staticmethod
    def _lost(reply: Reply, error: BaseException) -> None:
        # The owner sends again when it hears nothing: nothing is lost for good.
        log.error(
            "no answer could be sent to partition %d: %r",
            reply.to.reply_partition,
            error,
            extra={"request_id": reply.to.request_id},
        )
