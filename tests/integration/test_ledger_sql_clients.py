"""ClickHouse's clients on the read-only SQL endpoint, over the embedded engine."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import pyarrow.parquet
import pytest
from clickhouse_connect import dbapi
from clickhouse_connect.driver.exceptions import DatabaseError
from clickhouse_connect.driver.external import ExternalData

from schemas.records import Usage
from streams.http import HttpServer, bind
from streams.ledger.billing import UsageRow, row_of
from streams.ledger.clickhouse import BillingStore, QueryLimits, ReadOnlyEngine
from streams.ledger.config import DDL_DIR
from streams.ledger.sql_endpoint import SqlEndpoint

BEGAN = 1_764_446_000_000
COLUMNS = "request_id, tenant, output_tokens, accepted_at, slot, sealed"
ALL = f"SELECT {COLUMNS} FROM usage_final ORDER BY request_id"


def rows() -> list[UsageRow]:
    return [
        row_of(
            Usage(
                n.to_bytes(16, "big"), 1, n % 2 == 0, f"t{n % 3}", 2, "m", 10, 2, n, "stop",
                BEGAN + n, BEGAN + n, n if n % 2 else None, 7,
            )
        )
        for n in range(200)
    ]  # fmt: skip


EXPECTED = [
    (r.request_id, r.tenant, r.output_tokens, r.accepted_at.replace(tzinfo=None), r.slot, r.sealed)
    for r in rows()
]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder: Path = tmp_path_factory.mktemp("sql") / "data"
    store = BillingStore(f"chdb://{folder}")
    store.migrate(DDL_DIR)
    store.insert(rows())
    sock = bind("127.0.0.1", 0)
    stop = threading.Event()

    async def serve() -> None:
        endpoint = SqlEndpoint(ReadOnlyEngine(folder), QueryLimits(), 4, "127.0.0.1")
        http: Any = HttpServer(endpoint.app)
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        await asyncio.to_thread(stop.wait)
        http.should_exit = True
        await serving
        endpoint.close()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/ping"
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield sock.getsockname()[1]
    stop.set()
    thread.join(20)
    store.close()


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Any]:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=port)
    yield client
    client.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": True},
        {"compress": "lz4"},
        {"compress": "gzip"},
        {"database": "headrace", "username": "default", "password": "x"},
        {"session_id": "one", "query_limit": 1000},
    ],
)
def test_clickhouse_connect_as_it_may_be_configured(port: int, settings: dict[str, Any]) -> None:
    with clickhouse_connect.get_client(host="127.0.0.1", port=port, **settings) as client:
        assert client.query(ALL).result_rows == EXPECTED


def test_each_way_in_which_clickhouse_connect_reads(client: Any) -> None:
    assert client.ping()
    assert client.command("SELECT count() FROM usage") == 200
    assert client.query_arrow(ALL).num_rows == 200
    assert list(client.query_df(ALL)["output_tokens"]) == list(range(200))
    assert client.query_np("SELECT output_tokens FROM usage_final ORDER BY 1").ravel().tolist() == [
        *range(200)
    ]
    with client.query_row_block_stream(ALL) as blocks:
        assert [row for block in blocks for row in block] == EXPECTED
    with client.query_arrow_stream(ALL) as tables:
        assert sum(len(table) for table in tables) == 200
    empty = client.query(f"SELECT {COLUMNS} FROM usage LIMIT 0")
    assert empty.column_names == tuple(COLUMNS.split(", "))
    assert client.query("DESCRIBE TABLE usage").result_rows[0][:2] == ("request_id", "String")


async def test_its_asynchronous_client(port: int) -> None:
    client = await clickhouse_connect.get_async_client(host="127.0.0.1", port=port)
    assert (await client.query(ALL)).result_rows == EXPECTED
    await client.close()


def test_the_database_api_of_python(port: int) -> None:
    cursor = dbapi.connect(host="127.0.0.1", port=port).cursor()
    cursor.execute("SELECT tenant, count() FROM usage GROUP BY tenant ORDER BY 1 LIMIT %(n)s", {"n": 2})
    assert cursor.fetchall() == [("t0", 67), ("t1", 67)]


def test_parameters_are_values_whatever_their_length(client: Any) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5)
    asked = (
        "SELECT {text:String}, {number:Int64}, {list:Array(UInt8)}, {when:DateTime}, {none:Nullable(UInt8)}"
    )
    values = {"text": "'; DROP TABLE usage --\t\n", "number": -5, "list": [1, 2], "when": when, "none": None}
    assert client.query(asked, parameters=values).result_rows == [
        ("'; DROP TABLE usage --\t\n", -5, [1, 2], when, None)
    ]
    # What is too long for a URL comes as a form.
    for text in ("long " * 10_000, "ü" * 9_000):
        answer = client.query("SELECT {t:String}, {n:UInt8}", parameters={"t": text, "n": 7})
        assert answer.result_rows == [(text, 7)]
    client.form_encode_query_params = True
    try:
        assert client.query(ALL + " LIMIT {n:UInt8}", parameters={"n": 3}).result_rows == EXPECTED[:3]
    finally:
        client.form_encode_query_params = False


def test_formats(client: Any) -> None:
    asked = "SELECT output_tokens AS n, tenant FROM usage_final ORDER BY n LIMIT 2"

    def read(name: str) -> bytes:
        body: bytes = client.raw_query(asked, fmt=name)
        return body

    assert read("CSVWithNames") == b'"n","tenant"\n0,"t0"\n1,"t1"\n'
    assert read("TabSeparated") == b"0\tt0\n1\tt1\n"
    assert [json.loads(line) for line in read("JSONEachRow").splitlines()] == [
        {"n": 0, "tenant": "t0"},
        {"n": 1, "tenant": "t1"},
    ]
    document = json.loads(read("JSON"))
    assert document["meta"][0] == {"name": "n", "type": "UInt64"}
    assert document["rows"] == 2
    parquet = pyarrow.parquet.read_table(io.BytesIO(read("Parquet")))
    assert parquet.column("n").to_pylist() == [0, 1]
    assert read("Native")[:2] == b"\x02\x02"  # columns, rows


@pytest.mark.parametrize(
    "handshake",
    [
        # clickhouse-go (Grafana), clickhouse-jdbc (Metabase, DBeaver), Superset.
        "SELECT displayName(), version(), revision(), timezone()",
        "SELECT currentUser() AS user, timezone() AS timezone, version() AS version FORMAT TSV",
        "SELECT name, value, readonly AS readonly FROM system.settings LIMIT 10000",
        "SELECT name, type FROM system.columns WHERE database = 'headrace' AND table = 'usage'",
        "SHOW TABLES FROM headrace",
    ],
)
def test_what_clients_ask_first(port: int, handshake: str) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}/", content=handshake, params={"database": "default"})
    assert answer.status_code == 200, answer.text
    assert answer.content


def test_what_is_not_served_is_refused_by_name(port: int, client: Any) -> None:
    url = f"http://127.0.0.1:{port}/"
    framed = httpx.get(url, params={"query": "SELECT 1", "compress": "1"})
    assert (framed.status_code, framed.headers["x-clickhouse-exception-code"]) == (501, "48")
    assert "compress=1 is not served here: turn the client's compression off" in framed.text
    assert httpx.get(url, params={"query": "SELECT 1", "compress": "0"}).text == "1\n"
    elsewhere = httpx.get(url, params={"query": "SELECT 1"}, headers={"X-ClickHouse-Database": "x"})
    assert elsewhere.headers["x-clickhouse-exception-code"] == "81"
    with pytest.raises(DatabaseError, match="external data is not served here"):
        client.query(
            "SELECT * FROM ext",
            external_data=ExternalData(file_name="ext", data=b"1", fmt="CSV", structure=["a UInt8"]),
        )
    with pytest.raises(DatabaseError, match="this endpoint is read-only"):
        client.insert("usage", [["x"]], column_names=["tenant"])
    broken = httpx.post(url, content=b"--x\r\n", headers={"content-type": "multipart/form-data; boundary=y"})
    assert (broken.status_code, broken.headers["x-clickhouse-exception-code"]) == (400, "62")
    nameless = httpx.post(url, content=b"x", headers={"content-type": "multipart/form-data"})
    assert nameless.status_code == 400


def test_times_are_utc(client: Any) -> None:
    (when,) = client.query("SELECT min(accepted_at) FROM usage").result_rows[0]
    assert when.replace(tzinfo=UTC).timestamp() * 1000 == BEGAN
