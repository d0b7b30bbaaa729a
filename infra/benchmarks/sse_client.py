"""A raw asyncio client for streams: it notes when each token event arrives and does nothing else.

A load generator that parses JSON or decodes chunked bodies costs more per token than what it measures.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server is asked, and what its stream looks like.

    `token` is in each token event once and nowhere else. Of the two counts the last ones in the stream are
    right, and they are among its last `last_bytes`.
    """

    path: str
    token: bytes
    input_tokens: re.Pattern[bytes]
    output_tokens: re.Pattern[bytes]
    last_bytes: int


NATIVE = Dialect(
    path="/v1/generate",
    token=b'"type":"token"',
    input_tokens=re.compile(rb'"input_tokens":(\d+)'),
    output_tokens=re.compile(rb'"output_tokens":(\d+)'),
    last_bytes=512,
)

CHAT = Dialect(
    path="/v1/chat/completions",
    token=b'"delta":{"content":',
    input_tokens=re.compile(rb'"prompt_tokens":(\d+)'),
    output_tokens=re.compile(rb'"completion_tokens":(\d+)'),
    last_bytes=1_024,
)


class StreamFailedError(RuntimeError):
    """The answer was no complete stream; the message holds what came."""


@dataclass(slots=True)
class StreamTimes:
    """Seconds of `time.perf_counter`; `token_at` has an entry for each token event.

    `input_tokens` and `output_tokens` are what the last event says: an event that had to wait holds the text
    of several tokens.
    """

    request_id: str = ""
    sent_at: float = 0.0
    sent_at_epoch_ms: float = 0.0
    token_at: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.token_at[0] - self.sent_at) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1000 for a, b in zip(self.token_at, self.token_at[1:], strict=False)]


class _Stream(asyncio.Protocol):
    def __init__(self, dialect: Dialect, request: bytes, done: asyncio.Future[None]) -> None:
        self.times = StreamTimes()
        self._dialect = dialect
        self._answered = False
        self._request = request
        self._done = done
        self._head = b""
        self._tail = b""
        self._last = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.times.sent_at_epoch_ms = time.time() * 1000
        self.times.sent_at = time.perf_counter()
        # uvloop's transports are not of asyncio's classes.
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._answered:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return None
            head, _, data = self._head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                return self._fail(self._head.decode(errors="replace"))
            headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            self.times.request_id = headers.get(b"x-request-id", b"").decode()
            self._answered = True
        # An event may be cut by the network: look again at the end of what came before.
        dialect = self._dialect
        seen = self._tail + data
        count = seen.count(dialect.token)
        self.times.token_at += [now] * count
        self._tail = seen[-len(dialect.token) + 1 :]
        self._last = (self._last + data)[-dialect.last_bytes :]
        if self._last.endswith(_END) and not self._done.done():
            inputs = dialect.input_tokens.findall(self._last)
            outputs = dialect.output_tokens.findall(self._last)
            if not inputs or not outputs:
                return self._fail(f"the stream ended without its counts: {self._last!r}")
            self.times.input_tokens, self.times.output_tokens = int(inputs[-1]), int(outputs[-1])
            self._done.set_result(None)
            if self._transport is not None:
                self._transport.close()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended early: {error}")

    def _fail(self, message: str) -> None:
        if not self._done.done():
            self._done.set_exception(StreamFailedError(message))


async def stream(url: str, api_key: str, body: dict[str, object], dialect: Dialect = NATIVE) -> StreamTimes:
    """POSTs `body` and reads the stream to its end. Raises StreamFailedError, OSError, TimeoutError."""
    at = urlsplit(url)
    content = json.dumps({**body, "stream": True}).encode()
    request = (
        f"POST {dialect.path} HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    host, port = at.hostname or "127.0.0.1", at.port or 80
    transport, protocol = await loop.create_connection(lambda: _Stream(dialect, request, done), host, port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await done
    finally:
        transport.close()
    if not protocol.times.token_at:
        raise StreamFailedError("the stream held no token")
    return protocol.times
