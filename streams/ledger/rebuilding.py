"""The tables that a rebuild fills, and how they take the place of the ledger's own."""

from collections.abc import Sequence

from streams.ledger.billing import UsageRow
from streams.ledger.clickhouse import BillingStore
from streams.ledger.comparison import UsageTable
from streams.ledger.sql_guard import DATABASE

BILL, VERSIONS = "usage", "usage_rows"
REBUILT, REPLACED = "_rebuilt", "_replaced"


class Rebuilding:
    """Of one database, one at a time. Blocks; raises what the engine or the network raises.

    `to_swap`: both tables are made, from the same records: the bill, and all versions of its rows, by which
    is told what was not billed. Else the bill alone, to compare.
    """

    def __init__(self, store: BillingStore, *, to_swap: bool = False) -> None:
        self._store = store
        self._tables = (VERSIONS, BILL) if to_swap else (BILL,)
        self.drop()
        for table in self._tables:
            store.change(f"CREATE TABLE {DATABASE}.{table}{REBUILT} AS {DATABASE}.{table}")
        self.rebuilt = UsageTable(store.ask, BILL + REBUILT)
        self.in_use = UsageTable(store.ask)

    def insert(self, rows: Sequence[UsageRow]) -> None:
        for table in self._tables:
            self._store.insert_bill(rows, table + REBUILT)

    def swap(self) -> None:
        """Puts the new tables in the place of the old ones, which are kept under names that end in REPLACED.

        1. Those that a swap before this left go. 2. The new ones take their names: whoever reads or bills
        sees the old ones still. 3. Each is exchanged, at once for all, the bill last. If the process dies
        before that, the bill has not changed. What the ledger inserted meanwhile lies in the old tables: the
        caller inserts what has come to the topic since it began.
        """
        for table in self._tables:
            self._store.change(f"DROP TABLE IF EXISTS {DATABASE}.{table}{REPLACED} SYNC")
            self._store.change(f"RENAME TABLE {DATABASE}.{table}{REBUILT} TO {DATABASE}.{table}{REPLACED}")
        for table in self._tables:
            self._store.change(f"EXCHANGE TABLES {DATABASE}.{table} AND {DATABASE}.{table}{REPLACED}")

    def drop(self) -> None:
        for table in (VERSIONS, BILL):
            self._store.change(f"DROP TABLE IF EXISTS {DATABASE}.{table}{REBUILT} SYNC")
