"""Prices that can be billed by, and what they are called in control.prices."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.prices import (
    MAX_VALID_FROM,
    PriceError,
    check_price,
    discounted,
    parse_amount,
    parse_price_key,
    price_key,
    valid_from_text,
)
from schemas.records import Price

PRICE = Price("m", 2, 1_764_446_000_123, "USD", "0.15", "0.075", "10")


def key_of(price: Price) -> str:
    return price_key(price.model, price.priority, price.valid_from)


@given(st.text(min_size=1), st.integers(0, 2), st.integers(0, MAX_VALID_FROM))
def test_a_key_says_what_it_was_made_of(model: str, priority: int, valid_from: int) -> None:
    assert parse_price_key(price_key(model, priority, valid_from)) == (model, priority, valid_from)


@pytest.mark.parametrize("key", ["", "m", "1/m", "x/1/m", "1/3/m", "1/x/m"])
def test_another_key_is_none(key: str) -> None:
    with pytest.raises(PriceError, match="no key of a price"):
        parse_price_key(key)


def test_a_price_that_can_be_billed_by() -> None:
    assert check_price(key_of(PRICE), PRICE) is PRICE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("priority", 3),
        ("priority", -1),
        ("valid_from", -1),
        ("valid_from", MAX_VALID_FROM + 1),
        ("currency", "usd"),
        ("currency", "USDT"),
        ("input_price", "0.1234567"),
        ("input_price", "1e3"),
        ("input_price", "-1"),
        ("cached_input_price", "NaN"),
        ("cached_input_price", ".5"),
        ("output_price", "1234567890"),
        ("output_price", "٣"),
    ],
)
def test_another_names_its_field(field: str, value: object) -> None:
    price = replace(PRICE, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(PriceError, match=field):
        check_price(key_of(price), price)


def test_a_price_under_the_key_of_another_is_none() -> None:
    with pytest.raises(PriceError, match="key"):
        check_price(key_of(replace(PRICE, priority=1)), PRICE)


@given(st.decimals(0, 10**9 - 1, places=6), st.decimals(0, 100, places=2))
def test_less_a_discount_it_can_still_be_set(amount: Decimal, percent: Decimal) -> None:
    less = discounted(amount, percent)
    assert parse_amount("x", f"{less.normalize():f}") == less
    assert abs(less - amount * (100 - percent) / 100) <= Decimal("0.0000005")


def test_times_are_told_in_utc() -> None:
    assert valid_from_text(PRICE.valid_from) == "2025-11-29T19:53:20.123Z"
