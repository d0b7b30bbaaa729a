"""What tenants that have a budget have spent: whom to ask for, what to tell, who was told of what. Pure.

The sums are the table's own, so they are those of the bill, in whatever order usage came and how often. What
was told is read back from control.spend: a process that begins anew, or takes a tenant over, goes on from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from schemas.budgets import amounts_of, check_budget, month_of, spend_key, thresholds
from schemas.records import Budget, Spend, Tenant
from schemas.topics import DAY_MS, check_tenant

# Requests that were accepted before the end of a month may end so long behind it.
AFTER_MONTH_MS = 2 * DAY_MS
_LATEST_MS = 1 << 43  # the year 2248

# By tenant and month: by currency.
Sums = Mapping[tuple[str, str], Mapping[str, Decimal]]


class Alert(NamedTuple):
    tenant: str
    month: str
    percent: int
    threshold: Decimal
    currency: str
    spent: Decimal


class AlertRow(NamedTuple):
    """One row of headrace.alerts, columns in the table's order."""

    tenant: str
    month: str
    percent: int
    threshold: str
    currency: str
    spent: str
    told_at: datetime
    version: int


def alert_row(alert: Alert, now_ms: int, told_at: datetime) -> AlertRow:
    """`told_at` is `now_ms` as the table has it."""
    threshold, spent = f"{alert.threshold:f}", f"{alert.spent:f}"
    return AlertRow(
        alert.tenant, f"{alert.month}-01", alert.percent, threshold, alert.currency, spent, told_at,
        _LATEST_MS - now_ms,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be told: the record, and the alerts that it is the first to name."""

    spend: Spend
    alerts: list[Alert]


def open_months(now_ms: int) -> list[str]:
    """Those that usage still comes for."""
    return sorted({month_of(now_ms - AFTER_MONTH_MS), month_of(now_ms)})


class Spending:
    def __init__(self) -> None:
        self._budgets: dict[str, Budget] = {}
        self._told: dict[str, Spend] = {}
        self._sent: dict[str, Spend] = {}
        self._alerted: dict[str, set[str]] = {}
        self._due: set[str] = set()

    def put_tenant(self, name: str, tenant: Tenant | None) -> None:
        """A record of control.tenants. Raises ValueError for a bad name or budget."""
        check_tenant(name)
        budget = None if tenant is None else tenant.budget
        if budget is None:
            self._budgets.pop(name, None)
        elif check_budget(budget) != self._budgets.get(name):
            self._budgets[name] = budget
            self._due.add(name)

    def put_spend(self, key: str, spend: Spend | None) -> None:
        """A record of control.spend. One that this process did not write makes it ask anew."""
        if spend is None:
            self._told.pop(key, None)
            return
        self._told[key] = spend
        self._alerted.setdefault(key, set()).update(spend.alerted)
        if spend != self._sent.get(key):
            self._due.add(spend.tenant)

    def touched(self, tenants: Iterable[str]) -> None:
        """There is news of them in the table."""
        self._due.update(self._budgets.keys() & tenants)

    def touched_all(self) -> None:
        self._due.update(self._budgets)

    def take_due(self, mine: Callable[[str], bool], others_add: Callable[[str], bool]) -> list[str]:
        """Those to be asked for now. `mine`: this process tells of the tenant; `others_add`: usage of it may
        come to the table by other processes, of which nobody says a word."""
        due, self._due = self._due, set()
        return sorted(name for name in self._budgets if mine(name) and (name in due or others_add(name)))

    def changes(self, tenants: Sequence[str], months: Sequence[str], sums: Sums) -> list[Change]:
        """What is to be told of `tenants`, of which the table has `sums` and nothing else."""
        found = (
            self._change(name, month, sums.get((name, month), {})) for name in tenants for month in months
        )
        return [change for change in found if change is not None]

    def sent(self, spend: Spend) -> None:
        """The broker has it."""
        key = spend_key(spend.tenant, spend.month)
        self._sent[key] = spend
        self._alerted[key] = set(spend.alerted)

    def _change(self, name: str, month: str, sums: Mapping[str, Decimal]) -> Change | None:
        key, budget = spend_key(name, month), self._budgets.get(name)
        if budget is None:
            return None
        spent, known = sums.get(budget.currency, Decimal(0)), self._alerted.get(key, set())
        passed = [t for t in thresholds(budget) if t.amount <= spent and t.key not in known]
        alerted = sorted(known | {threshold.key for threshold in passed})
        spend = Spend(name, month, amounts_of(dict(sums)), alerted)
        told = self._told.get(key)
        if spend == told or (told is None and not sums):
            return None
        alerts = [Alert(name, month, t.percent, t.amount, budget.currency, spent) for t in passed]
        return Change(spend, alerts)
