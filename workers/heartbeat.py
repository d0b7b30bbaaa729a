"""Says every 100 ms that this run lives, and how it is."""

import asyncio
import logging
import time
from collections.abc import Callable

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas import topics
from schemas.codec import encode
from schemas.fleet import HEARTBEAT_INTERVAL_S
from schemas.records import Heartbeat

log = logging.getLogger(__name__)

_BEAT_S = 3.0  # aiokafka's own time limit does not hold for all of its waits


class HeartbeatLoop:
    """Sends what `look` returns. One beat at a time: a beat that was held up at the broker gets the broker's
    time when it arrives, so a backlog of old ones would pass for fresh news.
    """

    def __init__(self, producer: AIOKafkaProducer, look: Callable[[], Heartbeat]) -> None:
        self._producer = producer
        self._look = look
        self._missed = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def answered(self) -> bool:
        """The broker took the last one."""
        return not self._missed

    async def delivered(self) -> None:
        """Returns when a beat that was made after this call is acked. The caller sets a deadline."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    async def run(self) -> None:
        """Beats for ever, whatever the broker does."""
        due = time.monotonic()
        while True:
            await self._beat()
            due += HEARTBEAT_INTERVAL_S
            now = time.monotonic()
            if due < now:  # held up: go on from here instead of catching up
                due = now
            await asyncio.sleep(due - now)

    async def _beat(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            async with asyncio.timeout(_BEAT_S):
                await self._producer.send_and_wait(topics.HEARTBEATS, encode(self._look()), partition=0)
        except (KafkaError, TimeoutError) as error:
            if not self._missed:
                log.warning("a heartbeat was not delivered", extra={"error": repr(error)})
            self._missed = True
            self._waiting += waiting
        else:
            self._missed = False
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
