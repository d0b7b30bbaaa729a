"""Budgets: which may be held, what months are, and who is let in no more."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from schemas.budgets import (
    BudgetError,
    Standing,
    Told,
    check_budget,
    check_spend,
    exceeded,
    month_end,
    month_of,
    plain,
    spend_key,
    spent_in,
    thresholds,
)
from schemas.records import Amount, Budget, Spend, Tenant
from streams.admission.budgets import Budgets
from streams.admission.limits import Limits
from streams.admission.tenants import Tenants
from tests.admission_harness import make_request

NOVEMBER_END = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)
NOW = NOVEMBER_END - 3_600_000
TEN = Budget("10", "USD", [80])


def told(amount: str, month: str = "2026-11", currency: str = "USD", tenant: str = "demo") -> Spend:
    return Spend(tenant, month, [Amount(currency, amount)], [])


def admission(budget: Budget | None, *spends: Spend) -> Budgets:
    tenants = Tenants(Limits())
    for name in ("demo", "other"):
        tenants.put(name, Tenant(name, 0, [], [], budget=budget), NOW)
    budgets = Budgets(tenants)
    for spend in spends:
        budgets.put(spend_key(spend.tenant, spend.month), spend)
    return budgets


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        (Budget("-1", "USD", []), "budget.amount"),
        (Budget("1e3", "USD", []), "budget.amount"),
        (Budget("1", "usd", []), "budget.currency"),
        (Budget("1", "USD", [80, 101]), "budget.alert_percents"),
    ],
)
def test_a_budget_that_is_none_is_told_by_its_field(budget: Budget, field: str) -> None:
    with pytest.raises(BudgetError, match=field):
        check_budget(budget)
    tenants = Tenants(Limits())
    tenants.put("demo", Tenant("demo", 0, [], [], budget=TEN), NOW)
    with pytest.raises(ValueError, match=field):
        tenants.put("demo", Tenant("demo", 0, [], [], budget=budget), NOW)
    assert tenants.budget("demo") == TEN


@pytest.mark.parametrize(
    ("key", "spend"),
    [
        ("demo/2026-13", told("1", "2026-13")),
        ("demo/2026-11", told("1", "2026-12")),
        ("demo/2026-11", told("NaN")),
        ("demo/2026-11", told("a lot")),
        ("Demo/2026-11", told("1", tenant="Demo")),
    ],
)
def test_a_word_of_what_was_spent_that_cannot_be_believed_is_none(key: str, spend: Spend) -> None:
    with pytest.raises(BudgetError):
        check_spend(key, spend)


def test_months_are_those_of_utc() -> None:
    assert (month_of(NOVEMBER_END - 1), month_of(NOVEMBER_END)) == ("2026-11", "2026-12")
    assert month_end("2026-11") == datetime(2026, 12, 1, tzinfo=UTC)
    assert month_end("2026-12") == datetime(2027, 1, 1, tzinfo=UTC)


def test_thresholds_are_exact_each_once_and_none_of_a_budget_of_nothing() -> None:
    found = list(thresholds(Budget("0.3", "EUR", [100, 33, 33])))
    assert [(t.percent, t.amount, t.key) for t in found] == [
        (33, Decimal("0.099"), "0.099 EUR"),
        (100, Decimal("0.3"), "0.3 EUR"),
    ]
    assert list(thresholds(Budget("0", "EUR", [80]))) == []
    assert [plain(Decimal(text)) for text in ("1E+2", "0.100", "-0", "10.50")] == ["100", "0.1", "0", "10.5"]


def test_what_costs_another_currency_does_not_count() -> None:
    spend = Spend("demo", "2026-11", [Amount("EUR", "99"), Amount("USD", "3.5")], [])
    assert spent_in(spend, "USD") == Decimal("3.5")
    assert spent_in(spend, "CHF") == spent_in(None, "USD") == Decimal(0)


@pytest.mark.parametrize(
    ("budget", "spent", "stops"),
    [
        (TEN, "9.999999999999", False),
        (TEN, "10", True),
        (TEN, "11", True),
        (Budget("10", "USD", [], hard_stop=False), "11", False),
        (Budget("0", "USD", []), "0", True),
    ],
)
def test_all_of_it_spent_stops_and_only_where_it_is_to(budget: Budget, spent: str, stops: bool) -> None:
    assert exceeded(budget, Decimal(spent)) is stops
    refusal = admission(budget, told(spent)).refusal(make_request(accepted_at=NOW), NOW)
    assert (refusal is not None) is stops


def test_where_a_tenant_stands_is_told_with_how_new_that_is() -> None:
    last = Told(Spend("demo", "2026-11", [Amount("EUR", "7"), Amount("USD", "2.50")], ["8 USD"]), 17, 99)
    assert Standing("demo", "2026-11", TEN, last).view() == {
        "month": "2026-11",
        "spent": "2.5",
        "budget": "10",
        "currency": "USD",
        "share": 0.25,
        "stopped": False,
        "alerted": ["8 USD"],
        "offset": 17,
        "told_at": 99,
    }
    nothing = Standing("demo", "2026-11", Budget("0", "USD", []), None)
    assert (nothing.spent, nothing.share, nothing.stopped) == (Decimal(0), None, True)
    assert nothing.view()["told_at"] is None
    assert Standing("demo", "2026-11", replace(TEN, hard_stop=False), Told(told("11"), 1, 2)).stopped is False
    with pytest.raises(BudgetError, match="of another tenant"):
        Standing("other", "2026-11", TEN, last)


def test_a_refusal_names_budget_month_and_when_the_next_one_begins() -> None:
    budgets = admission(TEN, told("10.25"))
    refusal = budgets.refusal(make_request(accepted_at=NOW), NOW)
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.retry_after_ms) == (429, "budget_exceeded", 3_600_000)
    assert refusal.message == (
        "budget: tenant 'demo' has spent 10.25 of its budget of 10 USD for 2026-11; it is served again from "
        "2026-12-01T00:00:00Z on, or as soon as the budget is raised"
    )
    # Another tenant, a retry, and one of the next month are not touched.
    assert budgets.refusal(make_request(accepted_at=NOW, tenant="other"), NOW) is None
    assert budgets.refusal(make_request(accepted_at=NOW, attempt=2), NOW) is None
    assert budgets.refusal(make_request(accepted_at=NOVEMBER_END), NOVEMBER_END) is None
    # One of the old month is billed to it, whenever it is asked.
    late = budgets.refusal(make_request(accepted_at=NOW), NOVEMBER_END + 5)
    assert late is not None
    assert late.retry_after_ms == 1_000


def test_the_last_word_counts_and_a_word_taken_back_does_not() -> None:
    budgets = admission(TEN, told("12"), told("9"))
    assert budgets.refusal(make_request(accepted_at=NOW), NOW) is None
    budgets.put("demo/2026-11", told("12"))
    budgets.put("demo/2026-12", told("1", "2026-12"))
    assert budgets.refusal(make_request(accepted_at=NOW), NOW) is not None
    budgets.put("demo/2026-11", None)
    assert budgets.refusal(make_request(accepted_at=NOW), NOW) is None


def test_a_tenant_without_a_budget_may_spend_what_it_will() -> None:
    assert admission(None, told("1000000")).refusal(make_request(accepted_at=NOW), NOW) is None


def test_a_decision_costs_microseconds() -> None:
    budgets, request = admission(TEN, told("9")), make_request(accepted_at=NOW)
    began = time.process_time()
    for _ in range(1_000):
        budgets.refusal(request, NOW)
    assert time.process_time() - began < 0.1
