"""One HTTP request and its response, over raw ASGI."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gateway.idempotency import KeyedBody
from schemas.api.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderPairs = Iterable[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
_STREAM_HEADER = b"x-headrace-stream"


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
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def started_at(self) -> float:
        """Monotonic seconds."""
        return self._started_at

    async def read_body(self, limit: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        """The whole body. Raises ApiError 413 above `limit` bytes, 408 when it is late, ClientGoneError, and
        what `take` raises, which is told the size of each piece."""
        too_large = ApiError(413, "body_too_large", f"the body is larger than {limit} bytes")
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        self._reads_body = True
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large
                    take(len(part))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "body_timeout", f"the body did not arrive within {timeout_s:g} s") from None

    async def disconnected(self) -> None:
        """Returns when the client is gone. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: HeaderPairs) -> None:
        """Sends the status and headers, x-request-id and openai-processing-ms among them."""
        self.status = status
        if self.streams is not None:
            self.extra_headers.append((_STREAM_HEADER, self.streams().encode()))
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
