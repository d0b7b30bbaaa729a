"""What the read-only SQL endpoint lets through. Pure: judges the tree that ClickHouse's own parser made.

An allowlist throughout: statements, syntax nodes, tables, table functions, functions, formats. What a
newer ClickHouse adds is refused until it is named here. The engine's own `readonly = 1` stands behind it;
it alone would not do: with it, `SELECT file('/etc/passwd')`, `INTO OUTFILE`, `KILL QUERY` and `s3()` work.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from streams.ledger.sql_permissions import Permissions

DATABASE = "headrace"

SYNTAX_ERROR = 62
UNKNOWN_FORMAT = 73
UNKNOWN_DATABASE = 81
READONLY = 164
ACCESS_DENIED = 497

_STATEMENTS = frozenset(
    {"SelectWithUnionQuery", "ExplainQuery", "ShowTablesQuery", "ShowColumnsQuery", "ShowIndexesQuery"}
)
_NODES = _STATEMENTS | {
    "ArrayJoin",
    "Asterisk",
    "ColumnsApplyTransformer",
    "ColumnsExceptTransformer",
    "ColumnsListMatcher",
    "ColumnsRegexpMatcher",
    "ColumnsReplaceTransformer",
    "ColumnsReplaceTransformerReplacement",
    "ColumnsTransformerList",
    "ExpressionList",
    "Function",
    "Identifier",
    "InterpolateElement",
    "Literal",
    "OrderByElement",
    "QualifiedAsterisk",
    "QualifiedColumnsListMatcher",
    "QualifiedColumnsRegexpMatcher",
    "QueryParameter",
    "SampleRatio",
    "SelectIntersectExceptQuery",
    "SelectQuery",
    "SetQuery",
    "Subquery",
    "TableExpression",
    "TableIdentifier",
    "TableJoin",
    "TablesInSelectQuery",
    "TablesInSelectQueryElement",
    "WindowDefinition",
    "WindowListElement",
    "WithElement",
}
_EXPLAINS = frozenset({"EXPLAIN", "EXPLAIN AST", "EXPLAIN SYNTAX", "EXPLAIN QUERY TREE", "EXPLAIN PIPELINE"})
# The last are our own views with parameters.
_TABLE_FUNCTIONS = frozenset(
    {"generate_series", "generateseries", "numbers", "numbers_mt", "values", "view", "zeros", "zeros_mt"}
    | {"invoice"}
)
# What clients and dashboards ask for. Not processes, query_log, or anything that shows others' queries.
_SYSTEM_TABLES = frozenset(
    {
        "aggregate_function_combinators",
        "columns",
        "data_type_families",
        "databases",
        "formats",
        "functions",
        "keywords",
        "numbers",
        "numbers_mt",
        "one",
        "parts",
        "settings",
        "table_engines",
        "tables",
        "time_zones",
        "zeros",
    }
)
# Their right side may be the name of a table.
_MEMBERSHIP = frozenset(
    prefix + name for prefix in ("", "global") for name in ("in", "notin", "nullin", "notnullin")
)

_NAME = r"(?:[A-Za-z_]\w*|`[^`\\]+`)"
_DESCRIBE = "DESCRIBE TABLE "
_ABOUT_ONE_TABLE = re.compile(
    rf"(?:EXISTS|SHOW CREATE) (?:TABLE|VIEW|DATABASE) {_NAME}(?:\.{_NAME})?(?: FORMAT (?P<format>\w+))?"
)


class SqlRefusedError(ValueError):
    """A query that is not run. `code` is ClickHouse's number for the kind of error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def text_to_parse(canonical: str) -> str | None:
    """What to give `parseQueryToJSON` for a query in ClickHouse's canonical spelling.

    None for one that has no tree there, and which `check_without_tree` judges. DESCRIBE has none either,
    but what it describes is spelled like what a SELECT reads.
    """
    if canonical.startswith(_DESCRIBE):
        return "SELECT * FROM " + canonical.removeprefix(_DESCRIBE)
    head = canonical.partition(" ")[0]
    if head in ("SELECT", "WITH", "EXPLAIN") or canonical.startswith("("):
        return canonical
    if head == "SHOW" and not canonical.startswith("SHOW CREATE "):
        return canonical
    return None


def check_without_tree(canonical: str, may: Permissions) -> str | None:
    """As `check_tree`, for EXISTS and SHOW CREATE."""
    match = _ABOUT_ONE_TABLE.fullmatch(canonical)
    if match is None:
        raise _refuse_statement(canonical)
    return None if match["format"] is None else _format(match["format"], may)


def check_tree(tree_json: str, canonical: str, may: Permissions) -> str | None:
    """The format that the query asks for, or None. Raises SqlRefusedError that says what is not allowed."""
    try:
        tree = json.loads(tree_json)
    except RecursionError:
        raise SqlRefusedError(SYNTAX_ERROR, "the query is nested too deeply") from None
    if tree.get("type") not in _STATEMENTS:
        raise _refuse_statement(canonical)
    for key, node in _nodes(tree):
        _check_node(key, node, may)
    asked = tree.get("format_ast")
    return None if asked is None else _format(asked["name"], may)


def _nodes(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the tree that has a type, with the name of the field it stands in."""
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, list):
            stack += [(key, item) for item in value]
        elif isinstance(value, dict):
            if "type" in value:
                yield key, value
            stack += value.items()


def _check_node(key: str, node: dict[str, Any], may: Permissions) -> None:
    kind = node["type"]
    if kind not in _NODES:
        raise SqlRefusedError(ACCESS_DENIED, f"this endpoint does not serve {kind}")
    if "out_file" in node:
        raise SqlRefusedError(READONLY, "INTO OUTFILE is not allowed: this endpoint is read-only")
    match kind:
        case "Function" if key == "table_function":
            if node["name"].lower() not in _TABLE_FUNCTIONS:
                raise SqlRefusedError(ACCESS_DENIED, f"table function {node['name']}() is not allowed here")
        case "Function":
            _check_function(node["name"], may)
            if node["name"].lower().removesuffix("ignoreset") in _MEMBERSHIP:
                _check_in(node)
        case "ColumnsApplyTransformer" if "func_name" in node:
            _check_function(node["func_name"], may)
        case "TableIdentifier":
            _check_table(node.get("name_parts") or [node["name"]])
        case "QueryParameter" if node.get("param_type", "").lower() == "identifier":
            raise SqlRefusedError(ACCESS_DENIED, "parameters of type Identifier are not allowed here")
        case "ExplainQuery" if node["kind"] not in _EXPLAINS or "query" not in node:
            raise SqlRefusedError(ACCESS_DENIED, f"{node['kind']} is not allowed here")
        case "SetQuery" if key == "settings" and node.get("changes"):
            names = ", ".join(change["name"] for change in node["changes"])
            raise SqlRefusedError(READONLY, f"Cannot modify settings in readonly mode: {names}")


def _check_function(name: str, may: Permissions) -> None:
    if not may.allows(name):
        raise SqlRefusedError(ACCESS_DENIED, f"function {name}() is not allowed here")


def _check_in(node: dict[str, Any]) -> None:
    """`x IN name` reads the table of that name."""
    operands = node.get("arguments", {}).get("children", [])
    if len(operands) == 2 and operands[1]["type"] == "Identifier":
        _check_table(operands[1].get("name_parts") or [operands[1]["name"]])


def _check_table(parts: list[str]) -> None:
    if len(parts) == 1:
        return  # of our own database, which is the current one, or a WITH's
    database, table = parts[0], parts[-1]
    if len(parts) == 2 and database == DATABASE:
        return
    if len(parts) == 2 and database.lower() == "information_schema":
        return
    if len(parts) == 2 and database == "system" and table in _SYSTEM_TABLES:
        return
    raise SqlRefusedError(ACCESS_DENIED, f"table {'.'.join(parts)} may not be read here")


def _format(name: str, may: Permissions) -> str:
    if name not in may.formats:
        raise SqlRefusedError(UNKNOWN_FORMAT, f"Unknown format {name}")
    return name


def _refuse_statement(canonical: str) -> SqlRefusedError:
    words = " ".join(canonical.split()[:2])
    return SqlRefusedError(
        READONLY,
        f"Cannot execute query in readonly mode: {words}. "
        "Allowed: SELECT, WITH, SHOW, DESCRIBE, EXISTS, EXPLAIN",
    )
