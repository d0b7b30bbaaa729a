"""Reads who lives, for a worker whose handoffs depend on others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from schemas import topics
from schemas.codec import CodecError
from schemas.fleet import FleetView
from schemas.records import Heartbeat
from workers.mailbox import where

log = logging.getLogger(__name__)

_PARTITION = TopicPartition(topics.HEARTBEATS, 0)
# They are read in batches: each fetch costs more than a heartbeat.
_PAUSE_S = 0.05


class HeartbeatLog:
    """Feeds `view` with the fleet's heartbeats, from now on."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        view: FleetView,
        decode: Callable[[ConsumerRecord], Awaitable[Any]],
    ) -> None:
        self._consumer = consumer
        self._view = view
        self._decode = decode

    async def run(self, on_change: Callable[[], None]) -> None:
        """Says when there is something new, for ever. Raises aiokafka's OffsetOutOfRangeError when it was
        away for longer than the topic keeps."""
        [(partition, offset)] = (await self._consumer.end_offsets([_PARTITION])).items()
        self._consumer.assign([partition])
        self._consumer.seek(partition, offset)
        while True:
            for records in (await self._consumer.getmany(timeout_ms=1000)).values():
                for record in records:
                    try:
                        heartbeat = await self._decode(record)
                    except CodecError as error:
                        log.warning("a heartbeat cannot be decoded", extra=where(record, error))
                        continue
                    if isinstance(heartbeat, Heartbeat):
                        self._view.on_heartbeat(heartbeat, record.timestamp)
                on_change()
            await asyncio.sleep(_PAUSE_S)
