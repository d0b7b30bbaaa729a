"""What nobody wants any more, as the fleet's log says it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from schemas import topics
from schemas.codec import CodecError
from schemas.records import Cancellation
from workers.mailbox import where

log = logging.getLogger(__name__)


class CancellationLog:
    """Reads all cancellations, assigned by hand, with a consumer beside the mailbox's: there are many
    partitions and few records, and a dispatch is not to pay for that.

    A cancellation may so be read before or behind its dispatch, as between any two partitions.
    """

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        shards: int,
        decode: Callable[[ConsumerRecord], Awaitable[Any]],
    ) -> None:
        self._consumer = consumer
        self._partitions = [
            TopicPartition(topics.CANCELLATIONS, p) for p in range(shards * topics.NUM_CLASSES)
        ]
        self._decode = decode

    async def open(self) -> None:
        """Takes up its places at the ends. To be called before Join, so that what is cancelled of the new
        epoch's dispatches lies behind them."""
        places = await self._consumer.end_offsets(self._partitions)
        # Nothing may run between these lines: a partition without a place is an error to the consumer.
        self._consumer.assign(list(places))
        for partition, offset in places.items():
            self._consumer.seek(partition, offset)

    async def run(self, on_cancellation: Callable[[Cancellation], None]) -> None:
        """Hands over what comes, for ever. Raises aiokafka's OffsetOutOfRangeError, as `Mailbox.run` does."""
        while True:
            fetched = await self._consumer.getmany(timeout_ms=1000)
            for records in fetched.values():
                for record in records:
                    try:
                        cancellation = await self._decode(record)
                    except CodecError as error:
                        log.warning("a cancellation cannot be decoded", extra=where(record, error))
                        continue
                    if isinstance(cancellation, Cancellation):
                        on_cancellation(cancellation)
            await asyncio.sleep(0)  # getmany does not yield while it has records at hand
