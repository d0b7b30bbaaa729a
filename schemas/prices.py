"""Prices in time: which record of control.prices may count, and what it is called there. Pure.

A request costs what was valid when it was accepted. A price is in whole millionths of the currency a million
tokens, so that of a token has at most 12 digits behind the point, and every cost is exact.
"""

import re
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal

from schemas.priority import PriorityClass
from schemas.records import Price

PRICE_FIELDS = ("input_price", "cached_input_price", "output_price")
DECIMALS = 6
MAX_VALID_FROM = 7_258_118_399_999  # the end of 2199: more does not fit the table's DateTime64
_DECIMAL = re.compile(rf"[0-9]{{1,9}}(?:\.[0-9]{{1,{DECIMALS}}})?")
_CURRENCY = re.compile(r"[A-Z]{3}")
_STEP = Decimal(1).scaleb(-DECIMALS)


class PriceError(ValueError):
    """No price; the message names the field."""


def price_key(model: str, priority: int, valid_from: int) -> str:
    """Its key in control.prices: a later record of the same key replaces it."""
    return f"{valid_from}/{priority}/{model}"


def parse_price_key(key: str) -> tuple[str, int, int]:
    """(model, class, valid_from) of a key. Raises PriceError."""
    valid_from, _, rest = key.partition("/")
    priority, _, model = rest.partition("/")
    try:
        parsed = model, PriorityClass(int(priority)), int(valid_from)
    except ValueError:
        raise PriceError(f"{key[:80]!r} is no key of a price") from None
    return parsed


def check_price(key: str, price: Price) -> Price:
    """`price`, if it can be billed by. Raises PriceError."""
    if not price.model:
        raise PriceError("model is empty")
    if price.priority not in tuple(PriorityClass):
        raise PriceError(f"priority is {price.priority}, no class")
    if not 0 <= price.valid_from <= MAX_VALID_FROM:
        raise PriceError(f"valid_from is {price.valid_from}, not 0 to {MAX_VALID_FROM}")
    check_currency("currency", price.currency)
    for name in PRICE_FIELDS:
        parse_amount(name, getattr(price, name))
    if key != price_key(price.model, price.priority, price.valid_from):
        raise PriceError(f"key {key[:80]!r} is of another model, class or time than its price")
    return price


def parse_amount(field: str, text: str) -> Decimal:
    """The price of a million tokens. Raises PriceError that names `field`."""
    if not _DECIMAL.fullmatch(text):
        raise PriceError(
            f"{field} is {text[:40]!r}: use a decimal below 10⁹, at most {DECIMALS} digits behind the point"
        )
    return Decimal(text)


def check_currency(field: str, text: str) -> None:
    """Raises PriceError that names `field`."""
    if not _CURRENCY.fullmatch(text):
        raise PriceError(f"{field} is {text[:20]!r}: use three capital letters")


def discounted(amount: Decimal, percent: Decimal) -> Decimal:
    """`amount` less `percent` of it, rounded half up to a price that can be set."""
    return (amount * (100 - percent) / 100).quantize(_STEP, ROUND_HALF_UP)


def valid_from_text(valid_from: int) -> str:
    """ISO 8601, to the millisecond, in UTC."""
    when = datetime.fromtimestamp(valid_from / 1000, UTC)
    return when.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
