"""The same store code against ClickHouse's HTTP protocol, served here by the embedded engine with writes."""

import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chdb
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from schemas.records import Usage
from streams.http import HttpServer, bind
from streams.ledger.billing import row_of
from streams.ledger.clickhouse import BillingStore

ACCEPTED_AT = 1_764_446_000_123
DDL = Path(__file__).parents[2] / "infra" / "clickhouse"
_INSERT = re.compile(rb"(?P<into>INSERT INTO .*?)\s*FORMAT (?P<format>\w+)\n?", re.DOTALL | re.IGNORECASE)
_FORMAT = re.compile(r"\bFORMAT (\w+)\s*$")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """(address, engine handle)."""
    handle = chdb.connect(str(tmp_path / "data"))

    async def serve(request: Request) -> Response:
        text = "\n".join(filter(None, [request.query_params.get("query"), (await request.body()).decode()]))
        try:
            if insert := _INSERT.match(text.encode()):
                with tempfile.NamedTemporaryFile(dir=tmp_path) as rows:
                    rows.write(text.encode()[insert.end() :])
                    rows.flush()
                    into, kind = insert["into"].decode(), insert["format"].decode()
                    handle.query(f"{into} FROM INFILE '{rows.name}' FORMAT {kind}")
                return Response()
            body = handle.query(text, "TabSeparated").bytes()
        except Exception as e:
            return PlainTextResponse(str(e), 500, {"x-clickhouse-exception-code": "1000"})
        found = _FORMAT.search(text)
        return Response(body, headers={"x-clickhouse-format": found[1] if found else "TabSeparated"})

    sock = bind("127.0.0.1", 0)
    http: uvicorn.Server = HttpServer(Starlette(routes=[Route("/", serve, methods=["GET", "POST"])]))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
    thread.start()
    deadline = time.monotonic() + 10
    while not http.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield f"127.0.0.1:{sock.getsockname()[1]}", handle
    http.should_exit = True
    thread.join(10)
    handle.close()


def test_schema_and_rows_reach_a_server(server: tuple[str, Any]) -> None:
    address, handle = server
    store = BillingStore(f"http://default:@{address}")
    assert store.migrate(DDL) == ["001_usage.sql", "002_views.sql"]
    assert store.migrate(DDL) == []
    usages = [
        Usage(bytes([n] * 16), 1, False, "demo", 2, "m", 10, 0, n, "stop", ACCEPTED_AT, ACCEPTED_AT + 1)
        for n in range(3)
    ]
    store.insert([row_of(usage) for usage in usages])
    store.insert([row_of(usage) for usage in usages])
    store.close()
    bill = handle.query("SELECT requests, output_tokens FROM headrace.billing", "TabSeparated")
    assert bill.bytes() == b"3\t3\n"
    when = handle.query("SELECT DISTINCT accepted_at FROM headrace.usage", "TabSeparated")
    assert when.bytes() == b"2025-11-29 19:53:20.123\n"


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(Exception, match=str(port)) as caught:
        BillingStore(f"http://user:secret@127.0.0.1:{port}")
    assert "secret" not in str(caught.value)
