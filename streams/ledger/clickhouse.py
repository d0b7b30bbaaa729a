"""ClickHouse: the schema, inserts of usage rows, and (embedded only) read-only queries.

`chdb:///folder` is the engine inside this process, `http(s)://host:port` a server. All calls block: run
them in a thread. Handles of one process share the engine, so a long query holds up no insert.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chdb
import clickhouse_connect
from chdb._exceptions import ChdbError
from clickhouse_connect.driver.client import Client

from streams.ledger.billing import COLUMNS, UsageRow, encode_rows
from streams.ledger.prices import PRICE_COLUMNS, PriceRow
from streams.ledger.spending import AlertRow
from streams.ledger.sql_guard import (
    DATABASE,
    READONLY,
    SYNTAX_ERROR,
    UNKNOWN_FORMAT,
    SqlRefusedError,
    check_tree,
    check_without_tree,
    text_to_parse,
)
from streams.ledger.sql_permissions import Permissions, permissions

CHDB_SCHEME = "chdb://"
_MIGRATION_NAME = re.compile(r"(?P<number>\d{3})_\w+\.sql")
# A statement ends with a semicolon at the end of a line.
_STATEMENT_END = re.compile(r";[ \t]*(?:\n|$)")
_MIGRATIONS = f"""
CREATE TABLE IF NOT EXISTS {DATABASE}.migrations
(number UInt16, name String, sha256 String, applied_at DateTime64(3, 'UTC'))
ENGINE = ReplacingMergeTree ORDER BY number
"""
_ERROR = re.compile(r"Code: (?P<code>\d+)\. DB::Exception: (?P<text>.*)", re.DOTALL)
# How the engine ends a message about our own wrapping of a user's query.
_OUR_OWN_SCOPE = re.compile(r": (?:In scope|while executing) .*", re.DOTALL)


class MigrationError(RuntimeError):
    """The schema's files do not fit the database; the message names the file."""


class QueryError(RuntimeError):
    """The engine's refusal of a query, with its code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def chdb_folder(dsn: str) -> Path | None:
    """The folder of an embedded engine, None for a server."""
    return Path(dsn.removeprefix(CHDB_SCHEME)) if dsn.startswith(CHDB_SCHEME) else None


def migrations(folder: Path) -> list[tuple[int, Path]]:
    """The DDL files in order. Raises MigrationError for a bad name, a number given twice, or none at all."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*.sql")):
        match = _MIGRATION_NAME.fullmatch(path.name)
        if match is None:
            raise MigrationError(f"{path}: name it NNN_what.sql")
        number = int(match["number"])
        if number in found:
            raise MigrationError(f"{path}: number {number} is also {found[number].name}")
        found[number] = path
    if not found:
        raise MigrationError(f"{folder}: no *.sql there; set HEADRACE_DDL_DIR")
    return sorted(found.items())


def statements(sql: str) -> list[str]:
    return [part.strip() for part in _STATEMENT_END.split(sql) if part.strip()]


class BillingStore:
    """The tables. Not thread-safe: one call at a time. `connect_s`, `answer_s`: how long a server may take to
    be connected to, and to answer a call."""

    def __init__(self, dsn: str, *, connect_s: int = 10, answer_s: int = 300) -> None:
        folder = chdb_folder(dsn)
        timeouts: dict[str, Any] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            timeouts = {"connect_timeout": connect_s, "send_receive_timeout": answer_s}
        self._client: Client = clickhouse_connect.get_client(dsn=dsn, **timeouts)

    def migrate(self, folder: Path) -> list[str]:
        """Applies what is new, in order; returns the names. Raises MigrationError when a file was changed.

        Statements may be repeated (IF NOT EXISTS, OR REPLACE): a crash between one and its record only
        runs it again.
        """
        self._client.command(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
        self._client.command(_MIGRATIONS)
        recorded = self._client.query(f"SELECT number, sha256 FROM {DATABASE}.migrations FINAL")
        done = {row[0]: row[1] for row in recorded.result_rows}
        applied = []
        for number, path in migrations(folder):
            sql = path.read_text()
            digest = hashlib.sha256(sql.encode()).hexdigest()
            if number in done:
                if done[number] != digest:
                    raise MigrationError(f"{path}: changed after it was applied; add a new file instead")
                continue
            for statement in statements(sql):
                self._client.command(statement)
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
            row = json.dumps([number, path.name, digest, now]).encode()
            self._insert("migrations", ["number", "name", "sha256", "applied_at"], row)
            applied.append(path.name)
        return applied

    def insert(self, rows: Sequence[UsageRow]) -> None:
        """Returns when the rows are on disk. Raises whatever the engine or the network does."""
        if rows:
            encoded = encode_rows(rows)
            # 1. All versions, for what was not billed. 2. The bill. Who dies between them does both again.
            self._insert("usage_rows", COLUMNS, encoded)
            self._insert("usage", COLUMNS, encoded)

    def insert_bill(self, rows: Sequence[UsageRow], table: str) -> None:
        """As `insert`, into a table like headrace.usage alone."""
        if rows:
            self._insert(table, COLUMNS, encode_rows(rows))

    def insert_prices(self, rows: Sequence[PriceRow]) -> None:
        """As `insert`."""
        if rows:
            self._insert("prices", PRICE_COLUMNS, encode_rows(rows))

    def insert_alerts(self, rows: Sequence[AlertRow]) -> None:
        """As `insert`."""
        if rows:
            self._insert("alerts", AlertRow._fields, encode_rows(rows))

    def ask(self, sql: str) -> Sequence[Sequence[Any]]:
        """The rows that a query gives."""
        return self._client.query(sql).result_rows

    def change(self, sql: str) -> None:
        """Runs a statement that gives nothing."""
        self._client.command(sql)

    def _insert(self, table: str, columns: Sequence[str], rows: bytes) -> None:
        # As fast as by columns, and unlike it does not import pandas, which takes seconds.
        self._client.raw_insert(
            f"{DATABASE}.{table}", column_names=columns, insert_block=rows, fmt="JSONCompactEachRow"
        )

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What one query may use: seconds, bytes of memory, rows and bytes of result, threads."""

    time_s: float = 10.0
    memory_bytes: int = 256 << 20
    result_rows: int = 100_000
    result_bytes: int = 64 << 20
    threads: int = 1

    def settings(self) -> str:
        return (
            f"max_execution_time = {self.time_s}, timeout_overflow_mode = 'throw', "
            f"max_memory_usage = {self.memory_bytes}, max_threads = {self.threads}, "
            f"max_result_rows = {self.result_rows}, max_result_bytes = {self.result_bytes}, "
            "result_overflow_mode = 'throw', "
            "max_hyperscan_regexp_length = 1000, max_hyperscan_regexp_total_length = 10000, "
            "allow_introspection_functions = 0, session_timezone = 'UTC', allow_ddl = 0, readonly = 1"
        )


@dataclass(frozen=True, slots=True)
class QueryResult:
    body: bytes
    format: str
    rows_read: int
    bytes_read: int
    elapsed_s: float


class ReadOnlyEngine:
    """Read-only queries on the embedded engine. Thread-safe: every query has a handle of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        handle = chdb.connect(self._folder)
        try:
            self._permissions = _permissions(handle)
        finally:
            handle.close()

    @property
    def permissions(self) -> Permissions:
        return self._permissions

    def query(
        self, sql: str, default_format: str, parameters: Mapping[str, str], limits: QueryLimits
    ) -> QueryResult:
        """Raises SqlRefusedError, or QueryError with the engine's words.

        1. The engine's parser spells the text canonically: one statement, no comments. Nothing runs.
        2. Its tree is judged. 3. The canonical text, which is what was judged, runs on a handle that is
        read-only for the engine too, and whose limits can no longer be changed.
        """
        if default_format not in self._permissions.formats:
            raise SqlRefusedError(UNKNOWN_FORMAT, f"Unknown format {default_format}")
        handle = chdb.connect(self._folder)
        try:
            _run(handle, f"USE {DATABASE}")
            _run(handle, f"SET {limits.settings()}")
            canonical = _scalar(handle, f"SELECT formatQuerySingleLine({_literal(sql)})")
            asked = self._judge(handle, canonical)
            chosen = asked or default_format
            result = _run(handle, canonical, chosen, parameters)
            return QueryResult(
                body=result.bytes() or b"",
                format=chosen,
                rows_read=int(result.rows_read()),
                bytes_read=int(result.bytes_read()),
                elapsed_s=float(result.elapsed()),
            )
        finally:
            handle.close()

    def _judge(self, handle: Any, canonical: str) -> str | None:
        text = text_to_parse(canonical)
        if text is None:
            return check_without_tree(canonical, self._permissions)
        try:
            tree = _scalar(handle, f"SELECT parseQueryToJSON({_literal(text)})")
        except QueryError as e:
            if e.code == SYNTAX_ERROR:
                raise
            # Some statements have no tree: none of those is served.
            raise SqlRefusedError(READONLY, f"Cannot execute query in readonly mode: {canonical[:40]}") from e
        return check_tree(tree, canonical, self._permissions)


def _permissions(handle: Any) -> Permissions:
    functions = []
    listing = _text(
        handle, "SELECT name, alias_to, categories, is_aggregate FROM system.functions ORDER BY name"
    )
    for line in listing.splitlines():
        name, alias_to, categories, aggregate = line.split("\t")
        functions.append((name, alias_to, categories, aggregate == "1"))
    combinators = _text(handle, "SELECT name FROM system.aggregate_function_combinators").splitlines()
    formats = _text(handle, "SELECT name FROM system.formats WHERE is_output").splitlines()
    return permissions(functions, combinators, formats)


def _literal(text: str) -> str:
    """A literal that holds any text without a rule of escaping."""
    return f"unhex('{text.encode().hex()}')"


def _text(handle: Any, sql: str) -> str:
    body: bytes = _run(handle, sql, "TSVRaw").bytes() or b""
    return body.decode()


def _scalar(handle: Any, sql: str) -> str:
    try:
        return _text(handle, sql).removesuffix("\n")
    except QueryError as e:
        raise QueryError(e.code, _OUR_OWN_SCOPE.sub("", str(e))) from None


def _run(
    handle: Any, sql: str, result_format: str = "TabSeparated", parameters: Mapping[str, str] | None = None
) -> Any:
    try:
        return handle.query(sql, result_format, params=dict(parameters or {}))
    except (ChdbError, RuntimeError) as e:
        match = _ERROR.search(str(e))
        if match is None:
            raise QueryError(1000, str(e)) from e
        raise QueryError(int(match["code"]), match["text"]) from e
