"""Reading a lost gateway's partitions leaves the loop to live streams in between."""

import asyncio
import time
from typing import Any

from aiokafka import ConsumerRecord

from gateway.estate import Estate
from gateway.following import Following
from gateway.owner import Owner
from gateway.reply_offsets import reply_topics
from schemas.codec import decode, encode
from schemas.records import Dispatched, Tokens
from schemas.token_records import TokenChunk
from tests.gateway_factories import RecordingOutbox
from tests.log_consumer import LogConsumer, LogRecord

SLOT = 1
RID = bytes(range(16))
NUM_RECORDS = 150
DECODE_S = 0.0005


class SlotConsumer(LogConsumer):
    """Of a slot for which nothing was ever committed, but that is read from its beginning."""

    async def committed(self, partition: Any) -> int:
        return 0

    def highwater(self, partition: Any) -> int:
        return len(self.logs.get(partition, []))


async def test_live_streams_have_their_turn_while_a_batch_is_read() -> None:
    owner = Owner(0, 90, shards=4, cancel_timeout_ms=30_000)
    estate = Estate(SLOT, owner)
    first, *_ = reply_topics(SLOT)
    records: list[object] = [Dispatched(RID, 1, 70, 0, 55, "simulated", 2, 17)]
    records += [Tokens.of(0, 55, [TokenChunk(RID, 1, n, [97])]) for n in range(NUM_RECORDS)]
    consumer = SlotConsumer()
    consumer.logs[first] = [
        LogRecord(first.topic, first.partition, n, None, encode(record)) for n, record in enumerate(records)
    ]

    async def slow_decode(message: ConsumerRecord) -> object:
        until = time.monotonic() + DECODE_S
        while time.monotonic() < until:
            pass
        return decode(message.value or b"")

    following = Following(
        "nowhere:1", estate, owner, RecordingOutbox(), slow_decode, lambda: 5_000, lambda: False
    )
    reading = asyncio.create_task(following._read(consumer))
    seen = set()
    async with asyncio.timeout(10):
        while not following.caught_up:
            found = estate.found.get(RID)
            seen.add(0 if found is None else len(found.state.token_ids))
            await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert len(estate.found[RID].state.token_ids) == NUM_RECORDS
    # In one turn lie four records or so; without turns this sees the first state and the last.
    assert len(seen) > 10
