"""Read-only SQL in ClickHouse's HTTP protocol: for curl, dashboards and ClickHouse's own clients.

`GET /?query=…`, or the query as the body of a POST (behind `?query=`, where both are given), or a form of
`query` and `param_*`, as clients send long parameters. Errors come back with ClickHouse's text and
X-ClickHouse-Exception-Code. There are no users: keep it on loopback.
"""

import asyncio
import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from streams.ledger.clickhouse import QueryError, QueryLimits, QueryResult, ReadOnlyEngine
from streams.ledger.metrics import SQL_QUERIES
from streams.ledger.sql_guard import DATABASE, READONLY, SYNTAX_ERROR, UNKNOWN_DATABASE, SqlRefusedError

MAX_QUERY_BYTES = 256 << 10
SQL_THREADS = "sql-query"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_BUSY_WAIT_S = 1.0
_DEADLINE_GRACE_S = 5.0
_MAX_FIELDS = 1_000
_TIMEOUT, _TOO_MANY_QUERIES, _UNKNOWN_SETTING, _ABORTED = 159, 202, 115, 236
_NOT_IMPLEMENTED = 48
_STATUS = {
    _NOT_IMPLEMENTED: 501,
    READONLY: 403,
    497: 403,
    60: 404,
    UNKNOWN_DATABASE: 404,
    _TIMEOUT: 408,
    _TOO_MANY_QUERIES: 429,
    241: 413,
    396: 413,
    _ABORTED: 503,
}
_CONTENT_TYPES = {
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TSV": "text/tab-separated-values; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "Native": "application/octet-stream",
    "Parquet": "application/octet-stream",
    "Arrow": "application/octet-stream",
    "RowBinary": "application/octet-stream",
}
# ClickHouse's own frames of compressed blocks: a client that asks for them reads nothing else. HTTP's
# compression, on the other hand, is a server's to choose.
_FRAMED = ("compress", "decompress")
# Of the protocol, not of the query.
_IGNORED = frozenset(
    {
        "user",
        "password",
        "query_id",
        "session_id",
        "session_timeout",
        "session_check",
        "quota_key",
        "role",
        "buffer_size",
        "wait_end_of_query",
        "enable_http_compression",
        "http_zlib_compression_level",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "add_http_cors_header",
        "client_protocol_version",
        "readonly",
        "cancel_http_readonly_queries_on_client_close",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Query:
    sql: str
    default_format: str
    parameters: Mapping[str, str]
    limits: QueryLimits


class SqlEndpoint:
    """At most `concurrent` queries at once, in threads of their own, so that billing never waits here."""

    def __init__(self, engine: ReadOnlyEngine, limits: QueryLimits, concurrent: int, host: str) -> None:
        """`host` is the address it will be bound to."""
        self._engine = engine
        self._limits = limits
        self._threads = ThreadPoolExecutor(concurrent, thread_name_prefix=SQL_THREADS)
        self._free = asyncio.Semaphore(concurrent)
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A web page must not reach a loopback port under a name of its own (DNS rebinding).
        hosts = list(_LOOPBACK) if host in _LOOPBACK else ["*"]
        self.app = Starlette(
            routes=[
                Route("/ping", self._ping, methods=["GET"]),
                Route("/", self._serve, methods=["GET", "POST"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        )

    def close(self) -> None:
        """Answers whoever still waits; a thread ends when its query does."""
        if not self._closing.done():
            self._closing.set_result(None)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ping(self, request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    async def _serve(self, request: Request) -> Response:
        query_id = request.query_params.get("query_id") or secrets.token_hex(16)
        try:
            sql, parameters = await _asked(request)
            if sql is None:
                return PlainTextResponse("Ok.\n")
            result = await self._run(_query(sql, parameters, self._limits))
        except (SqlRefusedError, QueryError) as e:
            SQL_QUERIES.labels("refused" if isinstance(e, SqlRefusedError) else "failed").inc()
            return _error(e.code, str(e), query_id)
        SQL_QUERIES.labels("ok").inc()
        return Response(result.body, headers=_headers(result, query_id))

    async def _run(self, query: _Query) -> QueryResult:
        try:
            async with asyncio.timeout(_BUSY_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise QueryError(_TOO_MANY_QUERIES, "Too many simultaneous queries. Try again") from None
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, self._engine.query, query.sql, query.default_format, query.parameters, query.limits
        )
        # The engine looks at the clock between blocks only: a thread may outlive its answer, and keeps
        # its place until it ends.
        running.add_done_callback(self._ended)
        either: set[asyncio.Future[Any]] = {running, self._closing}
        await asyncio.wait(
            either,
            timeout=query.limits.time_s + _DEADLINE_GRACE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if running.done():
            return running.result()
        if self._closing.done():
            raise QueryError(_ABORTED, "The ledger is being stopped")
        raise QueryError(_TIMEOUT, f"Timeout exceeded: maximum: {query.limits.time_s} seconds")

    def _ended(self, running: "asyncio.Future[QueryResult]") -> None:
        self._free.release()
        if not running.cancelled():
            running.exception()  # seen, also where nobody waits any more


async def _asked(request: Request) -> tuple[str | None, Mapping[str, str]]:
    """The query's text, None where there is none, and all parameters: of the URL and of a form."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_QUERY_BYTES:
            raise SqlRefusedError(SYNTAX_ERROR, f"Max query size exceeded: {MAX_QUERY_BYTES} bytes")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise SqlRefusedError(
            SYNTAX_ERROR, "compressed bodies are not served here: this endpoint is read-only"
        )
    parameters = dict(request.query_params)
    if database := request.headers.get("x-clickhouse-database"):
        parameters.setdefault("database", database)
    parts = [parameters.pop("query", "")]
    if "multipart/form-data" in request.headers.get("content-type", ""):
        parameters |= await _form(request, bytes(body))
        parts.append(parameters.pop("query", ""))
    else:
        try:
            parts.append(body.decode())
        except UnicodeDecodeError:
            raise SqlRefusedError(SYNTAX_ERROR, "the query is not valid UTF-8") from None
    text = "\n".join(part for part in parts if part)
    return text or None, parameters


async def _form(request: Request, body: bytes) -> dict[str, str]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = MultiPartParser(
        request.headers, stream(), max_files=0, max_fields=_MAX_FIELDS, max_part_size=MAX_QUERY_BYTES
    )
    try:
        form = await parser.parse()
    except MultiPartException as e:
        if e.message.startswith("Too many files"):
            raise SqlRefusedError(READONLY, "external data is not served here") from None
        raise SqlRefusedError(SYNTAX_ERROR, f"the form cannot be read: {e.message}") from None
    return {name: str(value) for name, value in form.items()}


def _query(sql: str, params: Mapping[str, str], limits: QueryLimits) -> _Query:
    if len(sql) > MAX_QUERY_BYTES:
        raise SqlRefusedError(SYNTAX_ERROR, f"Max query size exceeded: {MAX_QUERY_BYTES} bytes")
    database = params.get("database", DATABASE)
    if database not in (DATABASE, "default", ""):
        raise SqlRefusedError(UNKNOWN_DATABASE, f"Database {database} does not exist. There is {DATABASE}")
    default_format = "TabSeparated"
    values: dict[str, str] = {}
    for name, value in params.items():
        if name in _FRAMED:
            if value not in ("0", "false"):
                raise SqlRefusedError(
                    _NOT_IMPLEMENTED,
                    f"{name}={value[:10]} is not served here: turn the client's compression off",
                )
        elif name == "default_format":
            default_format = value
        elif name.startswith("param_"):
            values[name.removeprefix("param_")] = value
        elif name not in _IGNORED and name != "database":
            limits = _lowered(limits, name, value)
    return _Query(sql, default_format, values, limits)


def _lowered(limits: QueryLimits, name: str, value: str) -> QueryLimits:
    """Limits may be lowered by whoever asks, and nothing else set."""
    fields = {
        "max_execution_time": "time_s",
        "max_memory_usage": "memory_bytes",
        "max_result_rows": "result_rows",
        "max_result_bytes": "result_bytes",
        "max_threads": "threads",
    }
    if name not in fields:
        raise SqlRefusedError(READONLY, f"Cannot modify '{name}' setting in readonly mode")
    field = fields[name]
    most = getattr(limits, field)
    try:
        wanted = type(most)(value)
    except ValueError:
        raise SqlRefusedError(_UNKNOWN_SETTING, f"{name}: {value[:40]!r} is no number") from None
    # 0 means no limit to ClickHouse.
    lowered = wanted if 0 < wanted < most else most
    return dataclasses.replace(limits, **{field: lowered})


def _headers(result: QueryResult, query_id: str) -> dict[str, str]:
    summary = {
        "read_rows": str(result.rows_read),
        "read_bytes": str(result.bytes_read),
        "written_rows": "0",
        "written_bytes": "0",
        "elapsed_ns": str(int(result.elapsed_s * 1e9)),
    }
    return {
        "content-type": _CONTENT_TYPES.get(result.format, "text/plain; charset=UTF-8"),
        "x-clickhouse-format": result.format,
        "x-clickhouse-query-id": query_id if query_id.isascii() and query_id.isprintable() else "",
        "x-clickhouse-timezone": "UTC",
        "x-clickhouse-summary": json.dumps(summary, separators=(",", ":")),
    }


def _error(code: int, message: str, query_id: str) -> Response:
    text = message if message.startswith("Code: ") else f"Code: {code}. DB::Exception: {message}"
    return PlainTextResponse(
        text.rstrip() + "\n",
        status_code=_STATUS.get(code, 400),
        headers={"x-clickhouse-exception-code": str(code), **({"retry-after": "1"} if code == 202 else {})},
    )
