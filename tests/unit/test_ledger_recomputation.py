"""What the log says against what a table says, while that goes on changing."""

import pytest

from schemas.codec import encode
from schemas.records import Usage
from streams.ledger.archive import ArchivedRecord
from streams.ledger.billing import UsageRow, row_of
from streams.ledger.comparison import Totals, UsageTable
from streams.ledger.recomputation import Differences, compare, rows_of
from streams.ledger.usage_source import Gap

BEGAN = 1_764_446_000_000
DAY = "2025-11-29"


def usage(n: int, output_tokens: int = 5) -> Usage:
    return Usage(
        n.to_bytes(16, "big"), 1, False, "demo", 2, "m", 10, 0, output_tokens, "stop", BEGAN, BEGAN, 0, 7
    )


class Answers:
    """A table of one tenant and day, as SQL gives it."""

    def __init__(self, rows: list[UsageRow]) -> None:
        self._rows = sorted((row.request_id, str(row.output_tokens)) for row in rows)

    def ask(self, sql: str) -> list[tuple[object, ...]]:
        if "DISTINCT" in sql:
            return [(202511,)] if self._rows else []
        if "GROUP BY" in sql:
            tokens = sum(int(row) for _, row in self._rows)
            return (
                [("demo", DAY, len(self._rows), 0, 0, tokens, hash(tuple(self._rows)))] if self._rows else []
            )
        after = sql.partition("u.request_id > '")[2].partition("'")[0]
        return [row for row in self._rows if row[0] > after]


def table(usages: list[Usage]) -> UsageTable:
    return UsageTable(Answers([row_of(each) for each in usages]).ask)


async def compared(log: list[Usage], found: list[Usage], later: list[Usage], most: int = 10) -> Differences:
    async def since() -> list[UsageRow]:
        return [row_of(each) for each in later]

    return await compare(table(log), table(found), since, most)


async def test_equal_tables_have_no_differences() -> None:
    assert not await compared([usage(1), usage(2)], [usage(2), usage(1)], [])
    assert not await compared([], [], [])


async def test_what_a_live_table_has_already_is_no_difference_and_what_it_lacks_is() -> None:
    log = [usage(n) for n in range(10)]
    newer = [usage(10), usage(3, 7)]
    live = [each for each in log if each.request_id != usage(3).request_id] + newer
    assert not await compared(log, live, newer)
    found = await compared(log, live[1:], newer)
    assert [(row.request_id, row.table) for row in found.rows] == [(usage(0).request_id.hex(), None)]
    assert [(day.log.rows, day.table.rows) for day in found.days] == [(10, 10)]
    # Without the later rows they are differences like any other.
    assert len((await compared(log, live, [])).rows) == 2


async def test_of_many_differences_some_are_named() -> None:
    found = await compared([usage(n) for n in range(50)], [], [], most=7)
    assert [row.request_id for row in found.rows] == [usage(n).request_id.hex() for n in range(7)]
    assert found.days[0].table == Totals()


@pytest.mark.parametrize("gaps", [[], [Gap(1, 5, 9)]])
def test_what_is_missing_in_the_log_is_a_difference(gaps: list[Gap]) -> None:
    assert bool(Differences(gaps=gaps)) == bool(gaps)


def test_what_the_ledger_could_not_bill_is_not_recomputed() -> None:
    nobody = Usage(bytes(16), 1, False, "No Tenant", 2, "m", 1, 0, 1, "stop", 1, 1)
    values = [encode(usage(1)), b"garbage", encode(nobody)]
    assert rows_of([ArchivedRecord(n, 0, value) for n, value in enumerate(values)]) == [row_of(usage(1))]
