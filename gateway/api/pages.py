"""Pieces of a list, as OpenAI's and Anthropic's clients ask for them."""

import re
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qs

from gateway.exchange import Exchange
from schemas.api.errors import ApiError, bad_field

_DIGITS = re.compile(r"[0-9]{1,6}")
T = TypeVar("T")


class Page(NamedTuple, Generic[T]):
    items: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    def openai(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """`data`: what is told of the items."""
        return {"object": "list", **self.anthropic(data)}

    def anthropic(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "data": data,
            "first_id": self.first_id,
            "last_id": self.last_id,
            "has_more": self.has_more,
        }


class PageQuery(NamedTuple):
    """`after` and `before`: ids that the piece lies behind or in front of."""

    limit: int
    after: str = ""
    before: str = ""
    after_name: str = "after"
    before_name: str = "before_id"

    def cut(self, items: Sequence[T], ids: Sequence[str]) -> Page[T]:
        """`ids` of `items`. Raises ApiError that names the cursor that is not there."""
        for name, cursor in ((self.after_name, self.after), (self.before_name, self.before)):
            if cursor and cursor not in ids:
                raise bad_field(name, f"there is none {cursor[:80]!r} in this list")
        if self.before:
            end = ids.index(self.before)
            begin = max(0, end - self.limit)
            has_more = begin > 0
        else:
            begin = ids.index(self.after) + 1 if self.after else 0
            end = min(len(ids), begin + self.limit)
            has_more = end < len(ids)
        shown = list(ids[begin:end])
        return Page(
            list(items[begin:end]), shown[0] if shown else None, shown[-1] if shown else None, has_more
        )


def openai_page(exchange: Exchange, default: int, most: int, *others: str) -> PageQuery:
    """`limit` and `after`. Raises ApiError that names what does not fit; `others` are read elsewhere."""
    query = query_of(exchange, "limit", "after", *others)
    return PageQuery(_limit(query, default, most), query.get("after", ""))


def anthropic_page(exchange: Exchange, default: int, most: int) -> PageQuery:
    """`limit`, and one of `after_id` and `before_id`. Raises ApiError that names what does not fit."""
    query = query_of(exchange, "limit", "after_id", "before_id")
    after, before = query.get("after_id", ""), query.get("before_id", "")
    if after and before:
        raise bad_field("before_id", "give either after_id or before_id")
    return PageQuery(_limit(query, default, most), after, before, "after_id")


def query_of(exchange: Exchange, *names: str) -> dict[str, str]:
    """The last value of each. Raises ApiError 400 for a name that is none of `names`."""
    found = parse_qs(exchange.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
    for name in found:
        if name not in names:
            raise ApiError(400, "unknown_field", f"{name[:40]}: this is not supported", name[:40])
    return {name: values[-1] for name, values in found.items()}


def _limit(query: dict[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise bad_field("limit", f"an integer from 1 to {most}, not {text[:40]!r}")
    return int(text)
