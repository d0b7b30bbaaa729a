"""Tells on control.spend what tenants that have a budget have spent, and operators when it is much."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from schemas import topics
from schemas.budgets import plain, spend_key
from schemas.clock import epoch_ms
from schemas.codec import encode
from streams.ledger.metrics import BUDGET_ALERTS, SPEND_FAILURES, SPEND_SECONDS
from streams.ledger.spending import AlertRow, Change, Spending, Sums, alert_row, open_months

log = logging.getLogger(__name__)

# The table is asked for at most this share of the time.
_ASKING_SHARE = 0.25
_ASK_TIMEOUT_S = 60.0
_SEND_TIMEOUT_S = 30.0


class SpendTables(Protocol):
    def spend(self, tenants: Sequence[str], months: Sequence[str]) -> Sums: ...

    def insert_alerts(self, rows: Sequence[AlertRow]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Scope:
    """See `Spending.take_due`."""

    mine: Callable[[str], bool]
    others_add: Callable[[str], bool]


class SpendTeller:
    """`tables` are asked in a thread of their own: an insert waits for no sum."""

    def __init__(
        self, spending: Spending, tables: SpendTables, producer: Any, scope: Scope, every_s: float
    ) -> None:
        self._spending, self._tables, self._producer = spending, tables, producer
        self._scope, self._every_s = scope, every_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spend")

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._tables.close()

    async def run(self) -> None:
        """Never gives up."""
        while True:
            began = time.monotonic()
            try:
                await self.tell(epoch_ms())
            except Exception as e:
                SPEND_FAILURES.inc()
                log.error("what tenants spent cannot be told, trying again", extra={"error": repr(e)})
            took = time.monotonic() - began
            await asyncio.sleep(max(self._every_s, took / _ASKING_SHARE - took))

    async def tell(self, now_ms: int) -> None:
        """Asks for those of whom there is news, and tells what is not told yet. Raises what goes wrong; then
        there is news of them still."""
        tenants = self._spending.take_due(self._scope.mine, self._scope.others_add)
        if not tenants:
            return
        try:
            months = open_months(now_ms)
            with SPEND_SECONDS.time():
                sums = await self._in_thread(self._tables.spend, tenants, months)
            for change in self._spending.changes(tenants, months, sums):
                await self._tell(change, now_ms)
        except BaseException:
            self._spending.touched(tenants)
            raise

    async def _tell(self, change: Change, now_ms: int) -> None:
        # 1. A row for each alert. Who dies behind this writes it again, and of its rows the first counts.
        if change.alerts:
            told_at = datetime.fromtimestamp(now_ms / 1000, UTC)
            rows = [alert_row(alert, now_ms, told_at) for alert in change.alerts]
            await self._in_thread(self._tables.insert_alerts, rows)
        # 2. The record. Admission holds the budget from here on, and no process alerts of this again.
        spend = change.spend
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            key = spend_key(spend.tenant, spend.month).encode()
            await self._producer.send_and_wait(topics.SPEND, encode(spend), key=key, partition=0)
        self._spending.sent(spend)
        # 3. The word to operators. If the process dies before it, the row of 1. is all there is.
        for alert in change.alerts:
            BUDGET_ALERTS.inc()
            told = alert._asdict() | {"threshold": plain(alert.threshold), "spent": plain(alert.spent)}
            log.warning("budget alert", extra=told)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
