"""The schema, the bill and the read-only guard on the embedded engine."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.records import Usage
from schemas.topics import DAY_MS
from streams.ledger.billing import billed, row_of
from streams.ledger.clickhouse import (
    BillingStore,
    MigrationError,
    QueryError,
    QueryLimits,
    ReadOnlyEngine,
    statements,
)
from streams.ledger.sql_guard import SqlRefusedError

DDL = Path(__file__).parents[2] / "infra" / "clickhouse"
LIMITS = QueryLimits(time_s=1.0, memory_bytes=100 << 20, result_rows=1000, result_bytes=1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chdb") / "data"


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[BillingStore]:
    store = BillingStore(f"chdb://{folder}")
    assert store.migrate(DDL) == [path.name for path in sorted(DDL.glob("*.sql"))]
    yield store
    store.close()


@pytest.fixture(scope="module")
def engine(store: BillingStore, folder: Path) -> ReadOnlyEngine:
    return ReadOnlyEngine(folder)


def ask(engine: ReadOnlyEngine, sql: str, limits: QueryLimits = LIMITS) -> str:
    return engine.query(sql, "TabSeparated", {}, limits).body.decode()


def make_usage(request: int, attempt: int, sealed: bool, output: int, tenant: str = "demo") -> Usage:
    accepted_at = 1_764_546_000_000 + request * 86_400_000  # a day apart: over the end of a month
    return Usage(
        bytes([request] * 16), attempt, sealed, tenant, request % 3, "m", 10, 2, output, "stop", accepted_at,
        accepted_at + 1,
    )  # fmt: skip


def test_one_billed_row_per_request_in_any_order(store: BillingStore, engine: ReadOnlyEngine) -> None:
    rng = random.Random(1)
    usages = [
        make_usage(request, attempt, sealed, rng.randrange(50), tenant)
        for tenant in ("demo", "other")
        for request in range(40)
        for attempt in (1, 2)
        for sealed in (False, True)
    ]
    usages += rng.choices(usages, k=100)
    rng.shuffle(usages)
    rows = [row_of(usage) for usage in usages]
    for begin in range(0, len(rows), 60):
        store.insert(rows[begin : begin + 60])
    truth = billed(rows)

    got = ask(engine, "SELECT tenant, request_id, version FROM usage_final ORDER BY 1, 2")
    want = "".join(f"{t}\t{rid}\t{row.version}\n" for (t, rid), row in sorted(truth.items()))
    assert got == want
    totals = ask(
        engine, "SELECT tenant, sum(requests), sum(output_tokens) FROM billing GROUP BY 1 ORDER BY 1"
    )
    assert totals == "".join(
        f"{t}\t40\t{sum(r.output_tokens for (x, _), r in truth.items() if x == t)}\n"
        for t in ("demo", "other")
    )


def test_late_and_resent_usage_counts_once_and_on_its_own_day(
    store: BillingStore, engine: ReadOnlyEngine
) -> None:
    """Rows that come after the others were merged: of a lower version, the same again, of a month ago."""
    sealed, lower = make_usage(1, 2, True, 30, "late"), make_usage(1, 1, False, 20, "late")
    bill = "SELECT toString(day), requests, output_tokens FROM billing WHERE tenant = 'late' ORDER BY 1"
    store.insert([row_of(sealed)])
    once = ask(engine, bill, QueryLimits())
    for resent in ([lower], [sealed], [lower, sealed, sealed]):
        store.change("OPTIMIZE TABLE headrace.usage FINAL")
        store.insert([row_of(usage) for usage in resent])
        assert ask(engine, bill, QueryLimits()) == once == "2025-12-01\t1\t30\n"
    # It is billed on the day that it was accepted, however late its end is told.
    month_ago = make_usage(2, 1, False, 7, "late")
    month_ago.accepted_at, month_ago.ended_at = sealed.accepted_at - 40 * DAY_MS, sealed.ended_at
    store.insert([row_of(month_ago)])
    assert ask(engine, bill, QueryLimits()) == "2025-10-22\t1\t7\n" + once


def test_migrations_run_once_and_may_not_change(store: BillingStore, tmp_path: Path) -> None:
    assert store.migrate(DDL) == []
    for path in DDL.glob("*.sql"):
        (tmp_path / path.name).write_text(path.read_text())
    changed = tmp_path / "002_views.sql"
    changed.write_text(changed.read_text() + "\n-- more\n")
    with pytest.raises(MigrationError, match=r"002_views\.sql: changed"):
        store.migrate(tmp_path)


def test_a_semicolon_inside_a_line_ends_nothing() -> None:
    assert statements("SELECT ';' x;\n\nSELECT 2;") == ["SELECT ';' x", "SELECT 2"]


GOOD = [
    "SELECT 1",
    "select 1; ",
    "-- a comment\nSELECT /* ; DROP TABLE usage */ 'it''s; \\' fine'",
    "SELECT * FROM usage LIMIT 1",
    "SELECT * FROM headrace.billing FORMAT JSON",
    "WITH x AS (SELECT tenant, sum(output_tokens) AS t FROM usage_final GROUP BY tenant) SELECT * FROM x",
    "SELECT tenant, sumIf(output_tokens, model = 'm'), uniqExact(request_id), quantile(0.5)(input_tokens),"
    " argMin(model, u.accepted_at), countIf(1) FROM usage AS u GROUP BY ROLLUP(tenant)",
    "SELECT toStartOfHour(accepted_at) AS h, count() OVER (PARTITION BY tenant ORDER BY h) FROM usage",
    "SELECT arrayMap(x -> x * 2, [1, 2]), CASE WHEN 1 THEN 2 ELSE 3 END, now() - INTERVAL 1 DAY, 1::Int8,"
    " tuple(1, 2).1, [1][1], 1 BETWEEN 0 AND 2, 'a' LIKE 'b', not 1, toDate('2026-01-01'), EXISTS (SELECT 1)",
    "SELECT tenant FROM usage WHERE tenant IN (SELECT tenant FROM billing) AND class IN ('batch', 'free')"
    " ORDER BY 1 LIMIT 1 BY tenant LIMIT 2",
    "SELECT a.tenant FROM billing AS a INNER JOIN billing AS b USING (tenant, day) LIMIT 1",
    "SELECT 1 UNION ALL SELECT 2 EXCEPT SELECT 3",
    "SELECT * EXCEPT (version) REPLACE (upper(tenant) AS tenant) APPLY toString FROM usage LIMIT 1",
    "SELECT COLUMNS('tenant') FROM usage LIMIT 1",
    "SELECT number FROM numbers(10) WHERE number % 2",
    "SELECT * FROM values('a UInt8', 1, 2)",
    "SELECT name FROM system.settings LIMIT 1",
    "SELECT table_name FROM information_schema.tables LIMIT 1",
    "SHOW TABLES",
    "SHOW DATABASES",
    "SHOW COLUMNS FROM usage",
    "SHOW CREATE TABLE usage",
    "SHOW CREATE TABLE headrace.usage",
    "SELECT * FROM invoice(tenant = 'demo', month = '2026-11-01')",
    "SELECT * FROM costs, top_tenants, not_billed, latencies, price_list LIMIT 1",
    "DESCRIBE TABLE usage",
    "DESC (SELECT 1 AS x)",
    "EXISTS TABLE usage",
    "EXPLAIN SELECT * FROM usage",
]  # fmt: skip


@pytest.mark.parametrize("sql", GOOD)
def test_what_a_reader_needs(engine: ReadOnlyEngine, sql: str) -> None:
    engine.query(sql, "TabSeparated", {}, LIMITS)


BAD = [
    # Writes, DDL, settings, system.
    "INSERT INTO usage (tenant) VALUES ('x')",
    "INSERT INTO usage SELECT * FROM usage",
    "INSERT INTO FUNCTION file('{out}', 'CSV', 'a UInt8') SELECT 1",
    "CREATE TABLE x (a UInt8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE x (a UInt8)",
    "CREATE TABLE x ENGINE = Memory AS SELECT 1",
    "CREATE VIEW v AS SELECT * FROM file('/etc/passwd', 'LineAsString')",
    "CREATE TABLE x (a String) ENGINE = File('CSV', '/etc/passwd')",
    "CREATE TABLE x (a String) ENGINE = URL('http://127.0.0.1:1/', 'CSV')",
    "CREATE FUNCTION f AS x -> file(x)",
    "CREATE DATABASE d",
    "CREATE USER u",
    "ALTER TABLE usage DELETE WHERE 1",
    "DELETE FROM usage WHERE 1",
    "UPDATE usage SET model = 'x' WHERE 1",
    "TRUNCATE TABLE usage",
    "DROP TABLE usage",
    "RENAME TABLE usage TO u2",
    "OPTIMIZE TABLE usage FINAL",
    "ATTACH TABLE x",
    "DETACH TABLE usage",
    "BACKUP TABLE usage TO File('x')",
    "SET readonly = 0",
    "SET max_memory_usage = 0",
    "SYSTEM FLUSH LOGS",
    "SYSTEM SHUTDOWN",
    "KILL QUERY WHERE 1",
    "USE system",
    "GRANT ALL ON *.* TO default",
    "CHECK TABLE usage",
    "BEGIN TRANSACTION",
    "EXPLAIN AST DROP TABLE usage",
    "EXPLAIN INSERT INTO usage SELECT * FROM usage",
    "EXPLAIN TABLE OVERRIDE mysql('') PARTITION BY x",
    # Several statements.
    "SELECT 1; DROP TABLE usage",
    "SELECT 1; SELECT 2",
    "SELECT 1 /* ; */ ; -- x\n SYSTEM FLUSH LOGS",
    # Files written.
    "SELECT 1 INTO OUTFILE '{out}'",
    "SELECT 1 into/**/outfile '{out}' TRUNCATE FORMAT CSV",
    "EXPLAIN AST SELECT 1 INTO OUTFILE '{out}'",
    "EXPLAIN SELECT 1 INTO OUTFILE '{out}'",
    "DESCRIBE TABLE usage INTO OUTFILE '{out}'",
    "SHOW TABLES INTO OUTFILE '{out}'",
    "SHOW CREATE TABLE usage INTO OUTFILE '{out}'",
    "EXISTS TABLE usage INTO OUTFILE '{out}'",
    # Files and hosts read.
    "SELECT file('/etc/passwd')",
    "SELECT FILE('/etc/passwd')",
    "SELECT `file`('/etc/passwd')",
    "SELECT /* x */ file /* y */ ('/etc/passwd')",
    "SELECT length(concat('a', file('/etc/passwd')))",
    "SELECT (SELECT file('/etc/passwd'))",
    "SELECT arrayMap(x -> file(x), ['/etc/passwd'])",
    "WITH '/etc/passwd' AS p SELECT file(p)",
    "WITH x AS (SELECT file('/etc/passwd') AS a) SELECT a FROM x",
    "SELECT sum(1) OVER (PARTITION BY file('/etc/passwd'))",
    "SELECT 1 ORDER BY file('/etc/passwd')",
    "SELECT 1 GROUP BY file('/etc/passwd')",
    "SELECT 1 HAVING file('/etc/passwd') = ''",
    "SELECT 1 LIMIT length(file('/etc/passwd'))",
    "SELECT * APPLY file FROM values('/etc/passwd')",
    "SELECT * APPLY(x -> file(x)) FROM values('/etc/passwd')",
    "SELECT * REPLACE (file('/etc/passwd') AS c1) FROM values('/etc/passwd')",
    "SELECT 1 UNION ALL SELECT length(file('/etc/passwd'))",
    "SELECT 1 WHERE EXISTS (SELECT file('/etc/passwd'))",
    "SHOW TABLES WHERE name = file('/etc/passwd')",
    "EXPLAIN SELECT file('/etc/passwd')",
    "SELECT * FROM values('a String', file('/etc/passwd'))",
    "SELECT a FROM numbers(1) ARRAY JOIN [file('/etc/passwd')] AS a",
    "SELECT 1 FROM numbers(1) AS a JOIN numbers(1) AS b ON file('/etc/passwd') = ''",
    "SELECT number FROM numbers(1) ORDER BY number WITH FILL TO length(file('/etc/passwd'))",
    "SELECT 1 WINDOW w AS (ORDER BY file('/etc/passwd'))",
    *(
        f"SELECT * FROM {call}"
        for call in (
            "file('/etc/passwd', 'LineAsString')",
            "FILE('/etc/passwd', 'LineAsString')",
            "`file`('/etc/passwd', 'LineAsString')",
            '"file"(\'/etc/passwd\', LineAsString)',
            "view(SELECT * FROM file('/etc/passwd', LineAsString))",
            "(SELECT * FROM (SELECT * FROM file('/etc/passwd', LineAsString)))",
            "fileCluster('default', '/etc/passwd')",
            "filesystem('/etc')",
            "url('http://127.0.0.1:1/', 'LineAsString')",
            "urlCluster('default', 'http://127.0.0.1:1/')",
            "s3('http://bucket.127.0.0.1:1/x', 'LineAsString')",
            "s3Cluster('default', 'http://127.0.0.1:1/x')",
            "gcs('http://127.0.0.1:1/x')",
            "azureBlobStorage('x')",
            "hdfs('hdfs://127.0.0.1:1/x')",
            "remote('127.0.0.1', system.one)",
            "remoteSecure('127.0.0.1', system.one)",
            "cluster('default', system.one)",
            "clusterAllReplicas('default', system.one)",
            "executable('ls', 'LineAsString', 'x String')",
            "mysql('127.0.0.1:1', 'd', 't', 'u', 'p')",
            "postgresql('127.0.0.1:1', 'd', 't', 'u', 'p')",
            "mongodb('127.0.0.1:1', 'd', 't', 'u', 'p')",
            "redis('127.0.0.1:1', 'k', 'k String')",
            "sqlite('/etc/passwd', 't')",
            "odbc('x', 't')",
            "jdbc('x', 't')",
            "iceberg('http://127.0.0.1:1/x')",
            "icebergLocal('/etc')",
            "deltaLakeLocal('/etc')",
            "python('os')",
            "arrowstream('x')",
            "merge('system', '.*')",
            "loop('system', 'one')",
            "dictionary('d')",
            "mergeTreeIndex('headrace', 'usage')",
            "input('a String')",
            "eval('SELECT 1')",
            "viewExplain('EXPLAIN', '', (SELECT 1))",
            "viewIfPermitted(SELECT 1 ELSE null('a UInt8'))",
            "generateRandom('a UInt8')",
            "fuzzQuery('SELECT 1')",
        )
    ),
    "DESCRIBE TABLE file('/etc/passwd')",
    "DESCRIBE TABLE url('http://127.0.0.1:1/')",
    "DESCRIBE TABLE (SELECT file('/etc/passwd') AS x)",
    "SELECT * FROM `/etc/passwd`.`x`",
    # Others' queries, dictionaries, the process.
    "SELECT * FROM system.processes",
    "SELECT * FROM `system`.`query_log`",
    "SELECT 1 IN system.processes",
    "SELECT 1 IN (system.processes)",
    "SELECT 1 GLOBAL NOT IN system.processes",
    "SELECT * FROM default.x",
    "SELECT joinGet('a.b', 'c', 1)",
    "SELECT dictGet('d', 'a', 1)",
    "SELECT hasColumnInTable('system', 'processes', 'query')",
    "SELECT getServerPort('tcp_port')",
    "SELECT getMacro('x')",
    "SELECT addressToLine(toUInt64(1))",
    "SELECT filesystemAvailable()",
    "SELECT sleep(3)",
    "SELECT sleepEachRow(0.1) FROM numbers(10)",
    "SELECT naiveBayesClassifier('m', 'x')",
    "SELECT aiGenerate('x')",
    "SELECT AIGenerate('x')",
    "SHOW PROCESSLIST",
    "SHOW ACCESS",
    "SHOW GRANTS",
    "SHOW CREATE USER default",
    # Limits may not be raised.
    "EXPLAIN indexes = 0 SELECT 1",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 SETTINGS max_execution_time = 1000",
    "SELECT * FROM (SELECT 1 SETTINGS max_memory_usage = 0)",
    "SELECT 1 FORMAT PostgreSQLWire",
    "SELECT 1 FORMAT NoSuchFormat",
    # No query.
    "",
    ";",
    "SELECT",
    "\x00",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("sql", BAD)
def test_what_is_refused(engine: ReadOnlyEngine, tmp_path: Path, sql: str) -> None:
    out = tmp_path / "out"
    with pytest.raises((SqlRefusedError, QueryError)) as caught:
        ask(engine, sql.replace("{out}", str(out)))
    # By us, or by the parser; never by what the statement met while it ran.
    if isinstance(caught.value, QueryError):
        assert caught.value.code in {62, 167, 306}, caught.value
    assert not out.exists()
    assert "unhex" not in str(caught.value)
    assert ask(engine, "EXISTS TABLE usage") == "1\n"


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT count() FROM numbers(1000000000000000000)", 159),
        ("SELECT groupArray(number) FROM numbers(1000000000)", 241),
        ("SELECT number FROM numbers(2000)", 396),
        ("SELECT concat(toString(number), repeat('x', 900000)) FROM numbers(10)", 396),
        ("SELECT count() FROM numbers(100000) AS a CROSS JOIN numbers(1000000) AS b", 159),
        ("SELECT nope FROM usage", 47),
        ("SELECT * FROM nope", 60),
    ],
)
def test_limits_and_errors_have_clickhouses_codes(engine: ReadOnlyEngine, sql: str, code: int) -> None:
    with pytest.raises(QueryError) as caught:
        ask(engine, sql)
    assert caught.value.code == code


def test_parameters_are_values_only(engine: ReadOnlyEngine) -> None:
    result = engine.query("SELECT {x:String}", "CSV", {"x": "'; DROP TABLE usage"}, LIMITS)
    assert result.body == b'"\'; DROP TABLE usage"\n'
    with pytest.raises(SqlRefusedError, match="Identifier"):
        engine.query("SELECT * FROM {x:Identifier}", "CSV", {"x": "system"}, LIMITS)


def test_the_engine_itself_is_read_only_behind_the_guard(folder: Path, store: BillingStore) -> None:
    import chdb

    handle = chdb.connect(str(folder))
    handle.query(f"SET {LIMITS.settings()}")
    for sql in (
        "INSERT INTO headrace.usage (tenant) VALUES ('x')",
        "DROP TABLE headrace.usage",
        "SET readonly = 0",
    ):
        with pytest.raises(Exception, match="READONLY"):
            handle.query(sql)
    handle.close()
