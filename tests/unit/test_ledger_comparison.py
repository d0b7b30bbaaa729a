"""Which requests two tables of usage differ in."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from streams.ledger.comparison import DayDifference, RowDifference, Totals, UsageTable, differing_rows

DAY = DayDifference("acme", "2026-01-01", Totals(), Totals())


class Rows(UsageTable):
    """A table's answer for one day."""

    def __init__(self, rows: dict[str, str]) -> None:
        self._rows = rows

    def rows(self, tenant: str, day: str) -> Iterator[tuple[str, str]]:
        return iter(sorted(self._rows.items()))


tables = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["1", "2"]))


@given(log=tables, table=tables)
def test_all_that_differ_are_named_and_nothing_else(log: dict[str, str], table: dict[str, str]) -> None:
    found = list(differing_rows(Rows(log), Rows(table), DAY))
    assert found == [
        RowDifference("acme", "2026-01-01", key, log.get(key), table.get(key))
        for key in sorted({*log, *table})
        if log.get(key) != table.get(key)
    ]
    for row in found:
        what = "lost" if row.table is None else "not in the log" if row.log is None else "another row"
        assert f"acme 2026-01-01 request {row.request_id}: {what}: log " in str(row)
