"""Budgets: what a tenant may spend in a month, what it has spent, and what follows from the two. Pure.

A month is UTC's, and a request belongs to the one it was accepted in, as its price does. The ledger tells on
control.spend what each tenant that has a budget has spent; amounts are exact decimals.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from schemas.prices import PriceError, check_currency, parse_amount
from schemas.records import Amount, Budget, Spend
from schemas.topics import check_tenant

DEFAULT_CURRENCY = "USD"
DEFAULT_ALERT_PERCENTS = (80,)
_MONTH = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])")


class BudgetError(ValueError):
    """No budget, or no word of what was spent; the message names the field."""


class Threshold(NamedTuple):
    """`key` is what it is called in `Spend.alerted`: a budget that is changed has others."""

    percent: int
    amount: Decimal
    key: str


class Told(NamedTuple):
    """A record of control.spend: where it lies, and its broker time (ms)."""

    spend: Spend
    offset: int
    told_at: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a tenant stands in a month. `told` is the last that was said of it, None where nothing was: then
    nothing of it is billed. Raises BudgetError where that cannot be believed."""

    tenant: str
    month: str
    budget: Budget
    told: Told | None

    def __post_init__(self) -> None:
        if self.told is not None:
            check_spend(spend_key(self.tenant, self.month), self.told.spend)

    @property
    def spent(self) -> Decimal:
        return spent_in(None if self.told is None else self.told.spend, self.budget.currency)

    @property
    def stopped(self) -> bool:
        return exceeded(self.budget, self.spent)

    @property
    def share(self) -> float | None:
        """Of the budget; None where that is 0."""
        total = Decimal(self.budget.amount)
        return round(float(self.spent / total), 6) if total else None

    def view(self) -> dict[str, Any]:
        """As JSON: amounts are decimal text, and `offset` and `told_at` say how new they are."""
        told = self.told
        return {
            "month": self.month,
            "spent": plain(self.spent),
            "budget": self.budget.amount,
            "currency": self.budget.currency,
            "share": self.share,
            "stopped": self.stopped,
            "alerted": [] if told is None else told.spend.alerted,
            "offset": None if told is None else told.offset,
            "told_at": None if told is None else told.told_at,
        }


def check_budget(budget: Budget) -> Budget:
    """`budget`, if it can be held. Raises BudgetError."""
    try:
        parse_amount("budget.amount", budget.amount)
        check_currency("budget.currency", budget.currency)
    except PriceError as e:
        raise BudgetError(str(e)) from None
    for percent in budget.alert_percents:
        if not 1 <= percent <= 100:
            raise BudgetError(f"budget.alert_percents: {percent} is not 1 to 100")
    return budget


def exceeded(budget: Budget, spent: Decimal) -> bool:
    """Whether nothing more may be let in."""
    return budget.hard_stop and spent >= Decimal(budget.amount)


def thresholds(budget: Budget) -> Iterator[Threshold]:
    """Lowest first. None of a budget of 0, which nobody waits to see spent."""
    total = Decimal(budget.amount)
    if total:
        for percent in sorted(set(budget.alert_percents)):
            amount = total * percent / 100
            yield Threshold(percent, amount, f"{plain(amount)} {budget.currency}")


def month_of(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m}"


def month_end(month: str) -> datetime:
    """When the next one begins."""
    year, number = map(int, month.split("-"))
    return datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)


def spend_key(tenant: str, month: str) -> str:
    """Its key in control.spend: a later record of the same key replaces it."""
    return f"{tenant}/{month}"


def check_spend(key: str, spend: Spend) -> Spend:
    """`spend`, if it can be believed. Raises BudgetError."""
    try:
        check_tenant(spend.tenant)
    except ValueError as e:
        raise BudgetError(str(e)) from None
    if not _MONTH.fullmatch(spend.month):
        raise BudgetError(f"month is {spend.month[:20]!r}: write it as 2026-11")
    if key != spend_key(spend.tenant, spend.month):
        raise BudgetError(f"key {key[:80]!r} is of another tenant or month than its record")
    for entry in spend.amounts:
        try:
            finite = Decimal(entry.amount).is_finite()
        except InvalidOperation:
            finite = False
        if not finite:
            raise BudgetError(f"amounts: {entry.amount[:40]!r} is no decimal")
    return spend


def spent_in(spend: Spend | None, currency: str) -> Decimal:
    """Nothing, where nothing was told."""
    amounts = () if spend is None else spend.amounts
    return sum((Decimal(entry.amount) for entry in amounts if entry.currency == currency), Decimal(0))


def amounts_of(sums: dict[str, Decimal]) -> list[Amount]:
    """By currency, in its order."""
    return [Amount(currency, plain(amount)) for currency, amount in sorted(sums.items())]


def plain(amount: Decimal) -> str:
    """Without an exponent, and without zeros at its end."""
    return f"{amount.normalize() + 0:f}"
