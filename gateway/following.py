"""Reading the reply partitions of another gateway's slot, for what is taken over from it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from gateway.estate import Estate
from gateway.outbox import Outbox
from gateway.owner import Owner
from gateway.reply_offsets import committed, reply_consumer, reply_topics
from gateway.turn import Turn
from schemas.records import Cancellation, Tokens
from schemas.stop_client import stop_client
from schemas.stream_state import ReplyRecord

log = logging.getLogger(__name__)

COMMIT_S = 1.0
_START_S = 5.0
_STOP_S = 5.0
_AGAIN_S = 1.0
_LOOK_S = 0.02
_POLL_MS = 100
_BATCH_RECORDS = 200


class Following:
    """Feeds `owner` and `estate` from where the slot's offsets were committed.

    `vacant()`: the slot has no gateway that commits, so this one does. `caught_up`: all there was is read.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        estate: Estate,
        owner: Owner,
        outbox: Outbox,
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        clock_ms: Callable[[], int],
        vacant: Callable[[], bool],
    ) -> None:
        self.estate = estate
        self.caught_up = False
        self._bootstrap_servers = bootstrap_servers
        self._owner = owner
        self._outbox = outbox
        self._decode = decode
        self._clock_ms = clock_ms
        self._vacant = vacant
        self._positions: dict[TopicPartition, int] = {}
        self._consumer: AIOKafkaConsumer | None = None

    async def run(self) -> None:
        """For ever: who wants no more of it cancels it."""
        while True:
            self._consumer = consumer = reply_consumer(self._bootstrap_servers, self.estate.slot)
            try:
                await self._read(consumer)
            except (TimeoutError, KafkaError) as e:
                log.warning(
                    "a slot cannot be followed; again",
                    extra={"gateway_slot": self.estate.slot, "error": repr(e)},
                )
            finally:
                await stop_client(consumer, _STOP_S)
            await asyncio.sleep(_AGAIN_S)

    async def at_end(self) -> None:
        """Returns when all that lies in the partitions now was given. The caller sets a deadline."""
        consumer = self._consumer
        if consumer is None or not self._positions:
            return  # nothing was taken over yet
        ends = await consumer.end_offsets(list(self._positions))
        while any(self._positions[p] < end for p, end in ends.items()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        partitions = reply_topics(self.estate.slot)
        async with asyncio.timeout(_START_S):
            await consumer.start()
            places = await committed(consumer, partitions)
        # After an error it goes on where it stopped: a reader that came must not be counted twice.
        self._positions = {**places, **self._positions}
        # With nothing awaited in between: a partition without a place is an error to the consumer.
        consumer.assign(partitions)
        for partition, offset in self._positions.items():
            consumer.seek(partition, offset)
        commit_at = time.monotonic() + COMMIT_S
        while True:
            batches = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_BATCH_RECORDS)
            turn = Turn()
            for partition, messages in batches.items():
                for message in messages:
                    self._give(await self._decode(message), message)
                    self._positions[partition] = message.offset + 1
                    await turn.take_turns()
            self.caught_up = all(consumer.highwater(p) in (None, self._positions[p]) for p in partitions)
            if time.monotonic() >= commit_at:
                commit_at = time.monotonic() + COMMIT_S
                if self._vacant() and self.caught_up:
                    async with asyncio.timeout(_START_S):
                        await consumer.commit(self._settled())
            await asyncio.sleep(0)

    def _give(self, record: object, message: ConsumerRecord) -> None:
        owner = self._owner
        if isinstance(record, Tokens):
            self._outbox.put(owner.on_tokens(record, message.timestamp, time.monotonic()))
        elif isinstance(record, Cancellation):
            self._outbox.put(owner.on_cancellation(record))
        elif isinstance(record, ReplyRecord):
            self._outbox.put(owner.on_record(record, message.timestamp))
        else:
            return
        clock_ms = self._clock_ms()
        self._outbox.put(
            self.estate.on_record(record, message.partition, message.offset, message.timestamp, clock_ms)
        )

    def _settled(self) -> dict[TopicPartition, int]:
        return {
            partition: oldest_open(partition.partition, position, self._owner, self.estate)
            for partition, position in self._positions.items()
        }


def oldest_open(partition: int, position: int, owner: Owner, estate: Estate) -> int:
    """Up to where everything in a reply partition that was read up to `position` has come to its end."""
    found = (owner.oldest(partition), estate.oldest(partition))
    return min([position, *(offset for offset in found if offset is not None)])
