"""A tenant's bill of a month: its lines as the view `invoice` gives them, and what they come to. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_CENT = Decimal("0.01")


class InvoiceError(ValueError):
    """What was asked for is no month."""


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """Tokens of one kind at one price, of a million; without one it and what follows are None."""

    model: str
    priority: str
    kind: str
    tokens: int
    price: Decimal | None
    price_valid_from: str | None
    currency: str | None
    amount: Decimal | None


@dataclass(frozen=True, slots=True)
class Invoice:
    """`totals` are exact, by currency. Tokens without a price are in none: then it is not `complete`."""

    tenant: str
    month: date
    lines: list[InvoiceLine]

    @property
    def totals(self) -> dict[str, Decimal]:
        found: dict[str, Decimal] = {}
        for line in self.lines:
            if line.currency is not None and line.amount is not None:
                found[line.currency] = found.get(line.currency, Decimal(0)) + line.amount
        return found

    @property
    def complete(self) -> bool:
        return all(line.amount is not None for line in self.lines)

    @property
    def unpriced_tokens(self) -> int:
        return sum(line.tokens for line in self.lines if line.amount is None)

    def view(self) -> dict[str, Any]:
        """For JSON: amounts are decimal text. `rounded` is to hundredths, half up, once."""
        return {
            "tenant": self.tenant,
            "month": f"{self.month:%Y-%m}",
            "complete": self.complete,
            "unpriced_tokens": self.unpriced_tokens,
            "totals": [
                {"currency": currency, "exact": plain(total), "rounded": plain(rounded(total))}
                for currency, total in sorted(self.totals.items())
            ],
            "lines": [
                {
                    "model": line.model,
                    "class": line.priority,
                    "kind": line.kind,
                    "tokens": line.tokens,
                    "price_per_million": None if line.price is None else plain(line.price),
                    "price_valid_from": line.price_valid_from,
                    "currency": line.currency,
                    "amount": None if line.amount is None else plain(line.amount),
                }
                for line in self.lines
            ],
        }


def parse_month(text: str) -> date:
    """The first day of 'YYYY-MM'. Raises InvoiceError."""
    try:
        return date.fromisoformat(f"{text}-01")
    except ValueError:
        raise InvoiceError(f"month {text!r}: write it as 2026-11") from None


def invoice_query(tenant: str, month: date) -> str:
    """`tenant` is the name of one, checked."""
    return (
        "SELECT model, class, kind, toString(tokens) AS tokens, toString(price) AS price, "
        "toString(price_valid_from) AS price_valid_from, currency, toString(amount) AS amount "
        f"FROM invoice(tenant = '{tenant}', month = '{month.isoformat()}')"
    )


def make_invoice(tenant: str, month: date, rows: Iterable[Mapping[str, Any]]) -> Invoice:
    """From the rows of `invoice_query`."""
    lines = [
        InvoiceLine(
            model=row["model"],
            priority=row["class"],
            kind=row["kind"],
            tokens=int(row["tokens"]),
            price=_decimal(row["price"]),
            price_valid_from=row["price_valid_from"],
            currency=row["currency"],
            amount=_decimal(row["amount"]),
        )
        for row in rows
    ]
    return Invoice(tenant, month, lines)


def rounded(total: Decimal) -> Decimal:
    return total.quantize(_CENT, ROUND_HALF_UP)


def plain(amount: Decimal) -> str:
    """Without an exponent, and without zeros at its end but those of hundredths."""
    text = f"{amount:f}"
    whole, _, digits = text.partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def _decimal(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)
