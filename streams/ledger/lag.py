"""How far the ledger is behind, and whether usage is still being read."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from streams.consumer import Consumer
from streams.ledger.metrics import LAG

log = logging.getLogger(__name__)

_LAG_S = 2.0
_ASK_TIMEOUT_S = 30.0
_STUCK_S = 30.0


async def watch_lag(
    consumer: Consumer,
    partitions: Callable[[], list[Any]],
    committed: Callable[[list[Any]], Awaitable[dict[Any, int]]],
    stored: Mapping[int, int],
) -> None:
    """Measures how far the ledger is behind, and says when it stands still. `stored` is the next offset by
    partition in this life, `committed` where it began."""
    progressed = time.monotonic()
    last: dict[int, int] = {}
    while True:
        await asyncio.sleep(_LAG_S)
        tps = partitions()
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                ends = await consumer.end_offsets(tps) if tps else {}
                begun = await committed(tps) if tps else {}
        except Exception as e:
            log.warning("the lag is not known", extra={"error": repr(e)})
            continue
        behind = 0
        for tp, end in ends.items():
            lag = end - max(stored.get(tp.partition, 0), begun.get(tp, 0))
            LAG.labels(str(tp.partition)).set(lag)
            behind += lag
        if not behind or stored != last:
            progressed, last = time.monotonic(), dict(stored)
        elif time.monotonic() - progressed > _STUCK_S:
            log.error("usage is not read any more", extra={"records_behind": behind})
            progressed = time.monotonic()
