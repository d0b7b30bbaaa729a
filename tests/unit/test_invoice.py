"""What the lines of an invoice come to."""

from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.invoice import InvoiceError, make_invoice, parse_month, plain, rounded

LINE = {
    "model": "m",
    "class": "batch",
    "kind": "output",
    "tokens": "1000",
    "price": "5",
    "price_valid_from": "2026-11-01 00:00:00.000",
    "currency": "USD",
    "amount": "0.005",
}
UNPRICED = {**LINE, "price": None, "price_valid_from": None, "currency": None, "amount": None}
MONTH = date(2026, 11, 1)


def test_currencies_are_not_added_up_and_only_the_total_is_rounded() -> None:
    lines = [LINE] * 3 + [{**LINE, "currency": "EUR", "amount": "0.004999999999"}]
    view = make_invoice("demo", MONTH, lines).view()
    assert view["totals"] == [
        {"currency": "EUR", "exact": "0.004999999999", "rounded": "0.00"},
        {"currency": "USD", "exact": "0.015", "rounded": "0.02"},
    ]
    assert (view["month"], view["complete"], view["unpriced_tokens"]) == ("2026-11", True, 0)
    assert view["lines"][0]["price_per_million"] == "5.00"


def test_what_has_no_price_is_in_no_total_and_said() -> None:
    view = make_invoice("demo", MONTH, [LINE, UNPRICED]).view()
    assert view["totals"] == [{"currency": "USD", "exact": "0.005", "rounded": "0.01"}]
    assert (view["complete"], view["unpriced_tokens"]) == (False, 1000)
    assert view["lines"][1]["amount"] is None


@given(st.decimals(0, 10**20, places=12))
def test_amounts_are_told_exactly(amount: Decimal) -> None:
    text = plain(amount)
    assert Decimal(text) == amount
    assert "E" not in text
    assert len(text.partition(".")[2]) >= 2
    assert abs(rounded(Decimal("1.005")) - Decimal("1.01")) == 0


@pytest.mark.parametrize("text", ["2026", "2026-13", "2026-11-01", "november", "2026-W01", "26-11"])
def test_a_month_is_written_one_way(text: str) -> None:
    with pytest.raises(InvoiceError, match="2026-11"):
        parse_month(text)
    assert parse_month("2026-11") == MONTH
