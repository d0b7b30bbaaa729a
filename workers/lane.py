"""Records for one partition, sent in order without anybody waiting."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaTimeoutError

from schemas.headers import Headers


class _Record(NamedTuple):
    value: bytes
    headers: Headers | None
    put_at: float
    acked: asyncio.Future[None]


class Lane:
    """A queue in front of one partition. The producer must be idempotent: it keeps the order and no doubles.

    `on_change` is called after each put and each ack. `on_fatal` gets the error of a record that can never
    be sent; the records behind it must not go out then, so the lane stands still.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        topic: str,
        partition: int,
        on_change: Callable[["Lane"], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.partition = partition
        self._producer = producer
        self._topic = topic
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._queued: deque[_Record] = deque()
        self._sent: deque[_Record] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"lane {topic}[{partition}]")

    @property
    def num_unacked(self) -> int:
        return len(self._queued) + len(self._sent)

    @property
    def last_acked(self) -> asyncio.Future[None] | None:
        """Done when all that was put so far is acked; None if it is."""
        newest = self._queued or self._sent
        return newest[-1].acked if newest else None

    def age(self, now: float) -> float:
        """Seconds that the oldest unacked record waits."""
        oldest = self._sent or self._queued
        return now - oldest[0].put_at if oldest else 0.0

    def put(self, value: bytes, headers: Headers | None = None) -> asyncio.Future[None]:
        """Queues a record; the future is done when the broker has acked it."""
        acked = asyncio.get_running_loop().create_future()
        self._queued.append(_Record(value, headers, time.monotonic(), acked))
        self._wake.set()
        self._on_change(self)
        return acked

    def halt(self) -> None:
        """Hands nothing more to the producer, from now on; `close` is still to be called."""
        self._queued.clear()
        self._task.cancel()

    async def close(self) -> None:
        """Stops sending. What is unacked may or may not arrive."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for record in (*self._sent, *self._queued):
            record.acked.cancel()

    async def _run(self) -> None:
        try:
            while True:
                while not self._queued:
                    self._wake.clear()
                    await self._wake.wait()
                record = self._queued[0]
                try:
                    sent = await self._producer.send(
                        self._topic, record.value, partition=self.partition, headers=record.headers
                    )
                except KafkaTimeoutError:
                    continue  # the producer's buffer is full, the broker is away: the record was not taken
                self._queued.popleft()
                self._sent.append(record)
                sent.add_done_callback(self._on_ack)
        except Exception as error:  # any other would end this task unheard
            self._on_fatal(error)

    def _on_ack(self, sent: asyncio.Future[object]) -> None:
        # Batches of one partition are acked in the order they were sent, so this is the oldest one.
        if sent.cancelled():
            return
        if error := sent.exception():
            self._on_fatal(error)
            return
        record = self._sent.popleft()
        if not record.acked.done():
            record.acked.set_result(None)
        self._on_change(self)
