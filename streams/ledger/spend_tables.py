"""What tenants spent, asked of the tables that the bill is made from, and the rows of alerts. Blocks."""

from collections.abc import Sequence
from decimal import Decimal

from schemas.topics import check_tenant
from streams.ledger.clickhouse import BillingStore
from streams.ledger.spending import AlertRow, Sums
from streams.ledger.sql_guard import DATABASE

_AT_ONCE = 1_000
_MAX_S = 30


class SpendTables:
    """Opened when first asked: a ledger with no tenant that has a budget waits for none. One call at once."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._opened: BillingStore | None = None

    def spend(self, tenants: Sequence[str], months: Sequence[str]) -> Sums:
        """The sums of `months` (2026-11, neighbours): what has no price is in none. Raises what the engine or
        the network does."""
        found: dict[tuple[str, str], dict[str, Decimal]] = {}
        for begin in range(0, len(tenants), _AT_ONCE):
            for tenant, month, currency, amount in self._store().ask(
                _query(tenants[begin : begin + _AT_ONCE], months)
            ):
                found.setdefault((tenant, month), {})[currency] = Decimal(amount)
        return found

    def insert_alerts(self, rows: Sequence[AlertRow]) -> None:
        """As `BillingStore.insert`."""
        self._store().insert_alerts(rows)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _store(self) -> BillingStore:
        if self._opened is None:
            self._opened = BillingStore(self._dsn)
        return self._opened


def _query(tenants: Sequence[str], months: Sequence[str]) -> str:
    names = ", ".join(f"'{check_tenant(name)}'" for name in tenants)
    return (
        "SELECT tenant, formatDateTime(day, '%Y-%m') AS month, assumeNotNull(currency) AS money, "
        "toString(sum(cost)) AS amount "
        f"FROM {DATABASE}.costs WHERE tenant IN ({names}) AND currency IS NOT NULL "
        f"AND day >= '{min(months)}-01' AND day < addMonths(toDate('{max(months)}-01'), 1) "
        f"GROUP BY tenant, month, money SETTINGS max_execution_time = {_MAX_S}"
    )
