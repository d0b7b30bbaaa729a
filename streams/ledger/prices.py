"""Prices on their way from control.prices to ClickHouse."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from schemas.prices import parse_price_key
from schemas.priority import PriorityClass
from schemas.records import Price

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class PriceRow(NamedTuple):
    """One row of headrace.prices, columns in the table's order."""

    model: str
    priority: str
    valid_from: datetime
    currency: str
    input_price: str
    cached_input_price: str
    output_price: str
    removed: bool
    version: int


PRICE_COLUMNS = tuple("class" if name == "priority" else name for name in PriceRow._fields)


def price_row(key: str, price: Price | None, offset: int) -> PriceRow:
    """The row of a record of control.prices at `offset`; None takes the price back. Raises PriceError."""
    model, priority, valid_from = parse_price_key(key)
    return PriceRow(
        model=model,
        priority=PriorityClass(priority).label,
        valid_from=_EPOCH + timedelta(milliseconds=valid_from),
        currency="" if price is None else price.currency,
        input_price="0" if price is None else price.input_price,
        cached_input_price="0" if price is None else price.cached_input_price,
        output_price="0" if price is None else price.output_price,
        removed=price is None,
        version=offset,
    )


class PriceKeeper:
    """Rows told of are stored in order by `store`, which returns when they are on disk."""

    def __init__(self, store: Callable[[Sequence[PriceRow]], Awaitable[None]]) -> None:
        self._store = store
        self._told: list[PriceRow] = []
        self._more = asyncio.Event()

    def tell(self, key: str, price: Price | None, offset: int) -> None:
        """Raises PriceError for a bad key."""
        self._told.append(price_row(key, price, offset))
        self._more.set()

    async def settle(self) -> None:
        """Returns when all that was told is on disk."""
        while self._told:
            rows = list(self._told)
            await self._store(rows)
            del self._told[: len(rows)]

    async def run(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self.settle()
