"""From raw records of inference.usage to rows in ClickHouse. Returns only when they are on disk."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from schemas import topics
from schemas.codec import CodecError
from schemas.dead_letters import dead_letter
from schemas.record_size import is_too_large
from schemas.records import Usage
from streams.consumer import decode_or_catch_up
from streams.ledger.billing import BillingError, UsageRow, row_of
from streams.ledger.metrics import DLQ, INSERT_FAILURES, INSERTS, ROWS
from streams.ledger.prices import PriceRow

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
MAX_RETRY_S = 10.0
SEND_TIMEOUT_S = 30.0


class Store(Protocol):
    def insert(self, rows: Sequence[UsageRow]) -> None: ...

    def insert_prices(self, rows: Sequence[PriceRow]) -> None: ...


class UsageIntake:
    """`catch_up` reads control.schemas to its end: asked when a writer's schema is not known yet. `on_stored`
    is told the tenants of which rows were stored."""

    def __init__(
        self,
        store: Store,
        producer: Any,
        catch_up: Callable[[], Awaitable[None]],
        on_stored: Callable[[set[str]], None] = lambda tenants: None,
    ) -> None:
        self._on_stored = on_stored
        self._store, self._producer, self._catch_up = store, producer, catch_up
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="billing")
        self.failing_since: float | None = None
        self.stored: dict[int, int] = {}

    async def take(self, messages: Sequence[Any]) -> None:
        """Stores a batch. It never gives up: only being cancelled ends it, and then nothing may be
        committed. `messages` have partition, offset, key, value and headers.

        1. What cannot be billed is kept as a dead letter, acked. 2. The rows are inserted, in one insert.
        If the process dies after either, the batch is read again: dead letters may be doubled, rows are
        the same rows.
        """
        rows: list[UsageRow] = []
        for message in messages:
            try:
                rows.append(row_of(await self._decode(message.value or b"")))
            except (CodecError, BillingError) as e:
                await self._bury(message, str(e))
        await self._until_it_works("insert", lambda: self._insert(rows))
        self._on_stored({row.tenant for row in rows})
        for message in messages:
            self.stored[message.partition] = message.offset + 1

    async def take_prices(self, rows: Sequence[PriceRow]) -> None:
        """Stores prices, by the thread that the tables belong to. It never gives up either."""
        loop = asyncio.get_running_loop()
        await self._until_it_works(
            "prices", lambda: loop.run_in_executor(self._thread, self._store.insert_prices, rows)
        )

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _decode(self, value: bytes) -> Usage:
        record = await decode_or_catch_up(value, self._catch_up)
        if not isinstance(record, Usage):
            raise CodecError(f"{type(record).__name__} does not belong on {topics.USAGE}")
        return record

    async def _insert(self, rows: list[UsageRow]) -> None:
        if not rows:
            return
        began = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.insert, rows)
        INSERTS.observe(time.perf_counter() - began)
        ROWS.inc(len(rows))

    async def _bury(self, message: Any, reason: str) -> None:
        log.error(
            "usage record that cannot be billed",
            extra={"partition": message.partition, "offset": message.offset, "reason": reason},
        )
        headers = message.headers or ()
        pairs = list(headers.items() if hasattr(headers, "items") else headers)
        letter, topic = dead_letter(message.key, message.value, pairs, reason), topics.dlq(topics.USAGE)

        async def send() -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._producer.send_and_wait(
                        topic,
                        letter.value,
                        key=letter.key,
                        partition=message.partition,
                        headers=letter.headers,
                    )
            except Exception as e:
                if not is_too_large(e):
                    raise
                # The topic was made to take less. Another try is of no use, and bills wait behind it.
                log.error("a dead letter is refused, and left out", extra={"topic": topic, "error": repr(e)})

        await self._until_it_works("dead letter", send)
        DLQ.labels("usage").inc()

    async def _until_it_works(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            try:
                await step()
            except Exception as e:
                INSERT_FAILURES.inc()
                self.failing_since = self.failing_since or time.monotonic()
                log.error("%s failed, trying again", what, extra={"error": repr(e), "wait_s": wait_s})
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, MAX_RETRY_S)
            else:
                self.failing_since = None
                return
