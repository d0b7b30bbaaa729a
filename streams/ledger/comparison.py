"""Two tables of usage that should be equal: which tenants, days and requests they differ in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streams.ledger.sql_guard import DATABASE

# A page of either side's rows: the read-only endpoint gives no more than HEADRACE_SQL_RESULT_ROWS.
ROWS_A_PAGE = 50_000
# What is billed, and who served it. Not the version: its tie-break is a hash of all the fields that a release
# knows, the rest of it is here. Nor figures that no bill needs, which older rows lack.
COMPARED = (
    "request_id",
    "tenant",
    "attempt",
    "sealed",
    "class",
    "model",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "finish_reason",
    "accepted_at",
    "ended_at",
    "slot",
    "epoch",
)
# As one text, for which no client has a type of its own.
ROW_TEXT = f"toString(tuple({', '.join(f'u.{column}' for column in COMPARED)}))"

Ask = Callable[[str], Sequence[Sequence[Any]]]


class Totals(NamedTuple):
    """Of one tenant and day, billable rows only. `digest` is a sum over the rows' hashes."""

    rows: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    digest: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.input_tokens}/{self.cached_tokens}/{self.output_tokens} tokens"


@dataclass(frozen=True, slots=True)
class DayDifference:
    """`log` is what the archive and the topic give, `table` what the table under test holds."""

    tenant: str
    day: str
    log: Totals
    table: Totals

    def __str__(self) -> str:
        return f"{self.tenant} {self.day}: {self.table} in the table, {self.log} in the log"


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A request that the two have not alike: None where one has none. Rows are texts."""

    tenant: str
    day: str
    request_id: str
    log: str | None
    table: str | None

    def __str__(self) -> str:
        what = "lost" if self.table is None else "not in the log" if self.log is None else "another row"
        rows = f"log {self.log or 'none'}, table {self.table or 'none'}"
        return f"{self.tenant} {self.day} request {self.request_id}: {what}: {rows}"


class UsageTable:
    """A table with the columns of headrace.usage, behind whatever answers SQL. Only reads."""

    def __init__(self, ask: Ask, name: str = "usage") -> None:
        self._ask, self._from = ask, f"FROM {DATABASE}.{name} AS u FINAL"

    def months(self) -> list[int]:
        """In the form 202612: the table's partitions."""
        found = self._ask(f"SELECT DISTINCT toYYYYMM(u.accepted_at) AS month {self._from} ORDER BY month")
        return [int(row[0]) for row in found]

    def totals(self, month: int) -> dict[tuple[str, str], Totals]:
        """By tenant and day."""
        sums = ", ".join(f"sum(u.{name})" for name in Totals._fields[1:4])
        found = self._ask(
            f"SELECT u.tenant, toString(toDate(u.accepted_at)) AS day, count(), {sums}, "
            f"sum(sipHash64({ROW_TEXT})) "
            f"{self._from} WHERE toYYYYMM(u.accepted_at) = {month} GROUP BY u.tenant, day"
        )
        return {(row[0], row[1]): Totals(*map(int, row[2:])) for row in found}

    def rows(self, tenant: str, day: str) -> Iterator[tuple[str, str]]:
        """(request_id, row), ordered."""
        after = ""
        while True:
            page = self._ask(
                f"SELECT u.request_id, {ROW_TEXT} {self._from} WHERE u.tenant = '{tenant}' "
                f"AND toDate(u.accepted_at) = '{day}' AND u.request_id > '{after}' "
                f"ORDER BY u.request_id LIMIT {ROWS_A_PAGE}"
            )
            yield from ((row[0], row[1]) for row in page)
            if len(page) < ROWS_A_PAGE:
                return
            after = page[-1][0]


def differing_days(log: UsageTable, table: UsageTable) -> list[DayDifference]:
    found = []
    for month in sorted({*log.months(), *table.months()}):
        ours, theirs = log.totals(month), table.totals(month)
        found += [
            DayDifference(*key, ours.get(key, Totals()), theirs.get(key, Totals()))
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        ]
    return found


def differing_rows(log: UsageTable, table: UsageTable, day: DayDifference) -> Iterator[RowDifference]:
    """The requests that make a day differ, ordered."""
    ours, theirs = log.rows(day.tenant, day.day), table.rows(day.tenant, day.day)
    left, right = next(ours, None), next(theirs, None)
    while left is not None or right is not None:
        request_id = min(row[0] for row in (left, right) if row is not None)
        in_log = in_table = None
        if left is not None and left[0] == request_id:
            in_log, left = left[1], next(ours, None)
        if right is not None and right[0] == request_id:
            in_table, right = right[1], next(theirs, None)
        if in_log != in_table:
            yield RowDifference(day.tenant, day.day, request_id, in_log, in_table)
