"""Usage computed anew from archive and topic: to check the ledger's table by, or to replace it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from schemas.codec import CodecError, decode
from schemas.records import Usage
from streams.ledger.archive import ArchivedRecord
from streams.ledger.billing import BillingError, UsageRow, row_of
from streams.ledger.comparison import (
    DayDifference,
    RowDifference,
    UsageTable,
    differing_days,
    differing_rows,
)
from streams.ledger.usage_source import Gap, UsageHistory

ROWS_AN_INSERT = 20_000
_ROWS_AT_ONCE = 10_000


class Store(Protocol):
    def insert(self, rows: Sequence[UsageRow]) -> None: ...


@dataclass(slots=True)
class Differences:
    """`days`, `rows` in order; of many rows the first alone. `gaps`: what cannot be computed."""

    days: list[DayDifference] = field(default_factory=list)
    rows: list[RowDifference] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.days or self.rows or self.gaps)


def rows_of(records: Sequence[ArchivedRecord]) -> list[UsageRow]:
    """Without those that were no usage, or could not be billed, when the ledger met them either."""
    rows = []
    for record in records:
        try:
            usage = decode(record.value)
            if isinstance(usage, Usage):
                rows.append(row_of(usage))
        except (CodecError, BillingError):
            continue
    return rows


async def recompute(history: UsageHistory, ends: Mapping[int, int], store: Store) -> int:
    """Fills `store` with all rows up to `ends`, the next offsets by partition; returns how many records there
    were. Raises what the archive, the broker and the store raise.
    """
    count = 0
    pending: list[UsageRow] = []
    async for _, records in history.read(ends):
        count += len(records)
        pending += await asyncio.to_thread(rows_of, records)
        if len(pending) >= ROWS_AN_INSERT:
            await asyncio.to_thread(store.insert, pending)
            pending = []
    await asyncio.to_thread(store.insert, pending)
    return count


async def compare(
    log: UsageTable, table: UsageTable, later: Callable[[], Awaitable[Sequence[UsageRow]]], max_rows: int
) -> Differences:
    """`later` is asked after the tables, for the rows of what came after that of `log`: a live table may have
    those already, so their requests are left out.
    """
    found = Differences()
    for day in await asyncio.to_thread(differing_days, log, table):
        pairs = differing_rows(log, table, day)
        while some := await asyncio.to_thread(list, islice(pairs, _ROWS_AT_ONCE)):
            moved = {(row.tenant, row.request_id) for row in await later()}
            some = [row for row in some if (row.tenant, row.request_id) not in moved]
            if some and day not in found.days:
                found.days.append(day)
            found.rows += some[: max_rows - len(found.rows)]
            if len(found.rows) >= max_rows:
                break
    return found
