"""Which functions and formats the read-only SQL endpoint lets through, from the engine's own lists. Pure.

By category, as ClickHouse documents its functions; a category that a newer ClickHouse adds is refused
until it is named here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_CATEGORIES = frozenset(
    {
        "Aggregate Functions",
        "Arithmetic",
        "Arrays",
        "Bit",
        "Bitmap",
        "Comparison",
        "Conditional",
        "Dates and Times",
        "Distance",
        "Encoding",
        "Financial",
        "Hash",
        "IP Address",
        "JSON",
        "Logical",
        "Map",
        "Mathematical",
        "Null",
        "Random Number",
        "Rounding",
        "String",
        "String Replacement",
        "String Search",
        "String Splitting",
        "Time Series",
        "Time Window",
        "Tuple",
        "Type Conversion",
        "URL",
        "UUID",
    }
)
# Harmless ones of categories that as a whole are not (Other, Internal), and names only the parser knows.
_NAMED_FUNCTIONS = frozenset(
    {
        "bar",
        "byteSize",
        "caseWithExpression",
        "currentDatabase",
        "currentUser",
        "displayName",
        "defaultValueOfArgumentType",
        "defaultValueOfTypeName",
        "exists",
        "finalizeAggregation",
        "formatQuery",
        "formatQuerySingleLine",
        "formatReadableDecimalSize",
        "formatReadableQuantity",
        "formatReadableSize",
        "formatReadableTimeDelta",
        "getSetting",
        "grouping",
        "identity",
        "ignore",
        "isConstant",
        "lambda",
        "materialize",
        "neighbor",
        "nested",
        "parseReadableSize",
        "parseTimeDelta",
        "revision",
        "rowNumberInAllBlocks",
        "rowNumberInBlock",
        "runningAccumulate",
        "runningDifference",
        "toColumnTypeName",
        "toTypeName",
        "transform",
        "untuple",
        "uptime",
        "version",
        "visibleWidth",
    }
)
# Shows addresses of the process.
_DENIED_FUNCTIONS = frozenset({"flameGraph"})
# Wire protocols are no file formats; templates read files.
_DENIED_FORMATS = frozenset(
    {"MySQLWire", "PostgreSQLWire", "ODBCDriver2", "Template", "CapnProto", "Protobuf"}
)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Names, in lower case, of the functions that may be called; `formats` as they are spelled."""

    functions: frozenset[str]
    aggregates: frozenset[str]
    combinators: tuple[str, ...]
    formats: frozenset[str]

    def allows(self, function: str) -> bool:
        name = function.lower()
        return name in self.functions or self._is_aggregate(name)

    def _is_aggregate(self, name: str) -> bool:
        return name in self.aggregates or any(
            self._is_aggregate(name[: -len(suffix)]) for suffix in self.combinators if name.endswith(suffix)
        )


def permissions(
    functions: Iterable[tuple[str, str, str, bool]], combinators: Iterable[str], formats: Iterable[str]
) -> Permissions:
    """From the engine's own lists: functions as (name, alias_to, categories, is_aggregate)."""
    rows = list(functions)
    listed = {name: (alias_to, category) for name, alias_to, category, _ in rows}

    def allowed(name: str) -> bool:
        alias_to, category = listed[name]
        if alias_to in listed and alias_to != name:
            return allowed(alias_to)
        return name not in _DENIED_FUNCTIONS and (category in _CATEGORIES or name in _NAMED_FUNCTIONS)

    # A name that differs from a refused one in case only is refused too.
    refused = {name.lower() for name in listed if not allowed(name)}
    good = {name.lower() for name in _NAMED_FUNCTIONS} | {n.lower() for n in listed if allowed(n)}
    return Permissions(
        functions=frozenset(good - refused),
        aggregates=frozenset(n.lower() for n, *_, aggregate in rows if aggregate) - refused,
        combinators=tuple(suffix.lower() for suffix in combinators if suffix),
        formats=frozenset(formats) - _DENIED_FORMATS,
    )
