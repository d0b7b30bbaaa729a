"""What lies in topics between two places, read by hand once, start to end."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from streams.consumer import Consumer, assign_at

SILENCE_TIMEOUT_S = 60.0
_POLL_MS = 500
_FETCH_RECORDS = 2_000


async def scan(
    consumer: Consumer, starts: Mapping[Any, int], stops: Mapping[Any, int], take: Callable[[Any], None]
) -> None:
    """Gives `take` every record from `starts` on and below `stops` (offsets by partition), each partition's
    in order. Raises TimeoutError when the broker says nothing for a minute.
    """
    left = {place: stops[place] for place, start in starts.items() if start < stops[place]}
    assign_at(consumer, {place: starts[place] for place in left})
    while left:
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            batch = await consumer.getmany(*left, timeout_ms=_POLL_MS, max_records=_FETCH_RECORDS)
            for place, records in batch.items():
                for record in records:
                    if record.offset < left[place]:
                        take(record)
            for place in list(left):
                # Ends of transactions take offsets too: the last record's says nothing.
                if await consumer.position(place) >= left[place]:
                    del left[place]


async def offsets_at(consumer: Consumer, partitions: Iterable[Any], when: datetime) -> dict[Any, int]:
    """The first offset not before a time, of partitions that have one."""
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, int(when.timestamp() * 1_000)))
    return {place: at.offset for place, at in found.items() if at is not None}
