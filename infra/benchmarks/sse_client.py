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

_TOKEN = b'"type":"token"'
_END = b"0\r\n\r\n"
_USAGE = re.compile(rb'"output_tokens":(\d+)')
_LAST_BYTES = 256
TIMEOUT_S = 300.0


class StreamFailedError(RuntimeError):
    """The answer was no complete stream; the message holds what came."""


@dataclass(slots=True)
class StreamTimes:
    """Seconds of `time.perf_counter`; `token_at` has an entry for each token event.

    `output_tokens` is what the done event says: an event that had to wait holds the text of several tokens.
    """

    request_id: str = ""
    sent_at: float = 0.0
    sent_at_epoch_ms: float = 0.0
    token_at: list[float] = field(default_factory=list)
    output_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.token_at[0] - self.sent_at) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1000 for a, b in zip(self.token_at, self.token_at[1:], strict=False)]


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.times = StreamTimes()
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
        if not self.times.request_id:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return None
            head, _, data = self._head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                return self._fail(self._head.decode(errors="replace"))
            headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            self.times.request_id = headers[b"x-request-id"].decode()
        # An event may be cut by the network: look again at the end of what came before.
        seen = self._tail + data
        count = seen.count(_TOKEN)
        self.times.token_at += [now] * count
        self._tail = seen[-len(_TOKEN) + 1 :]
        self._last = (self._last + data)[-_LAST_BYTES:]
        if self._last.endswith(_END) and not self._done.done():
            usage = _USAGE.search(self._last)
            if usage is None:
                return self._fail(f"the stream ended without usage: {self._last!r}")
            self.times.output_tokens = int(usage[1])
            self._done.set_result(None)
            if self._transport is not None:
                self._transport.close()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended early: {error}")

    def _fail(self, message: str) -> None:
        if not self._done.done():
            self._done.set_exception(StreamFailedError(message))


async def stream(url: str, api_key: str, body: dict[str, object]) -> StreamTimes:
    """POST /v1/generate with `body`, read to the end. Raises StreamFailedError, OSError, TimeoutError."""
    at = urlsplit(url)
    content = json.dumps({**body, "stream": True}).encode()
    request = (
        f"POST /v1/generate HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    host, port = at.hostname or "127.0.0.1", at.port or 80
    transport, protocol = await loop.create_connection(lambda: _Stream(request, done), host, port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await done
    finally:
        transport.close()
    if not protocol.times.token_at:
        raise StreamFailedError("the stream held no token")
    return protocol.times
