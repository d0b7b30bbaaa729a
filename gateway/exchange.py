"""One HTTP request and its response, over raw ASGI."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gateway.idempotency import KeyedBody
from schemas.api.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderPairs = Iterable[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
STREAM_HEADER = b"x-headrace-stream"
# Less than this in the time that a body has is no progress.
_PROGRESS_BYTES = 65_536


class ClientGoneError(Exception):
    """The client closed the connection before there was an answer."""


class Exchange:
    """`request_id` (16 random bytes) is the request's in all topics, and in x-request-id.

    `extra_headers` go out with whatever response there will be, `late_headers()` too, known when it begins,
    and `streams()` as x-headrace-stream. `keyed`: what its Idempotency-Key says, once the body is read.
    """

    __slots__ = (
        "_reads_body",
        "_receive",
        "_started_at",
        "extra_headers",
        "headers",
        "keyed",
        "late_headers",
        "request_id",
        "scope",
        "send",
        "status",
        "streams",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.request_id = secrets.token_bytes(16)
        self.status: int | None = None
        self.keyed: KeyedBody | None = None
        self.late_headers: Callable[[], HeaderPairs] | None = None
        self.streams: Callable[[], str] | None = None
        self._receive = receive
        self._reads_body = False
        self._started_at = time.monotonic()

    @property
    def started(self) -> bool:
        """A status was sent: from here on a refusal cannot be one."""
        return self.status is not None

    @property
    def awaits_continue(self) -> bool:
        """The client asked to be told before it sends its body, and was not."""
        return not self._reads_body and self.headers.get(b"expect", b"").lower() == b"100-continue"

    @property
    def base_url(self) -> str:
        """Of this API as the client spells it, as far as this process can know."""
        host = self.headers.get(b"host", b"").decode("latin-1")
        scheme = self.headers.get(b"x-forwarded-proto", b"").decode("latin-1")
        return f"{scheme if scheme in ('http', 'https') else 'http'}://{host}" if host else ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def started_at(self) -> float:
        """Monotonic seconds."""
        return self._started_at

    async def read_body(self, limit: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        """The whole body, within `timeout_s`. Raises what `body_pieces` raises, and what `take` raises, which
        is told the size of each piece."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(timeout_s):
                async for part in self.body_pieces(limit, timeout_s):
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            raise _late(timeout_s) from None
        return b"".join(parts)

    async def body_pieces(self, limit: int, timeout_s: float) -> AsyncIterator[bytes]:
        """The body as it comes in. Raises ApiError 413 above `limit` bytes, 408 where no 64 KiB come within
        `timeout_s` (the caller's own time does not count), ClientGoneError."""
        too_large = ApiError(413, "body_too_large", f"the body is larger than {limit} bytes")
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        self._reads_body = True
        loop = asyncio.get_running_loop()
        size = since = 0
        due = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(due):
                    message = await self._receive()
            except TimeoutError:
                raise _late(timeout_s) from None
            if message["type"] != "http.request":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            size += len(part)
            since += len(part)
            if size > limit:
                raise too_large
            begin = loop.time()
            yield part
            if not message.get("more_body", False):
                return
            if since < _PROGRESS_BYTES:
                due += loop.time() - begin
            else:
                since, due = 0, loop.time() + timeout_s

    async def disconnected(self) -> None:
        """Returns when the client is gone. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: HeaderPairs) -> None:
        """Sends the status and headers, x-request-id and openai-processing-ms among them."""
        self.status = status
        if self.streams is not None:
            self.extra_headers.append((STREAM_HEADER, self.streams().encode()))
        if self.late_headers is not None:
            self.extra_headers += self.late_headers()
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    *self.extra_headers,
                    (b"x-request-id", self.request_id.hex().encode()),
                    (b"openai-processing-ms", b"%d" % int(self.elapsed_s * 1000)),
                ],
            }
        )

    async def respond(self, status: int, body: bytes, headers: HeaderPairs = (JSON,)) -> None:
        """A whole response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send({"type": "http.response.body", "body": body})


def _late(timeout_s: float) -> ApiError:
    return ApiError(408, "body_timeout", f"the body did not arrive within {timeout_s:g} s")
