"""Heartbeats: this process's own, and those of the whole fleet."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from schemas import topics
from schemas.codec import encode
from schemas.fleet import HEARTBEAT_INTERVAL_S, Producer
from schemas.records import Heartbeat
from streams.consumer import Consumer, assign_at
from streams.membership import Membership

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 1.0
_POLL_MS = 1_000


async def beat(producer: Producer, look: Callable[[], Heartbeat]) -> None:
    """Sends what `look` returns, every 100 ms. One that the broker does not take in time is left out.

    One at a time: held up together they would all get the time when they arrive, and pass for news.
    """
    due = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await producer.send_and_wait(topics.HEARTBEATS, encode(look()), partition=0)
        except Exception as error:
            log.warning("no heartbeat could be sent", extra={"error": repr(error)})
        due = max(due + HEARTBEAT_INTERVAL_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


async def follow_heartbeats(
    consumer: Consumer, partition: Callable[[str, int], Any], membership: Membership
) -> None:
    """Reads fleet.heartbeats from now on."""
    assign_at(consumer, await consumer.end_offsets([partition(topics.HEARTBEATS, 0)]))
    while True:
        for records in (await consumer.getmany(timeout_ms=_POLL_MS)).values():
            membership.on_heartbeats(records)
