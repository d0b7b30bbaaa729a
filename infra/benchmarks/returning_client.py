"""A client of /v1/generate that comes back to its stream, at the next gateway, when its connection breaks."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 120.0
_AGAIN_S = 0.05
_BROKEN = (OSError, asyncio.IncompleteReadError, EOFError)


class RefusedError(RuntimeError):
    """The answer was no stream; the message holds what came. `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LeftError(Exception):
    """Raise it in `on_events`: the client goes for good."""


OnEvents = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Delivery:
    """What one client was shown. `at`: when each token event came (seconds of `time.perf_counter`).

    `away_ms`: for each time that it came back, how long after its connection broke the next event came.
    """

    request_id: bytes = b""
    stream_id: str = ""
    position: int = -1
    text: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    away_ms: list[float] = field(default_factory=list)
    broke_at: float | None = None
    done: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def largest_gap_ms(self, since: float) -> float:
        """Between two events of which the second came after `since`."""
        gaps = [b - a for a, b in zip(self.at, self.at[1:], strict=False) if b > since]
        return max(gaps, default=0.0) * 1000


async def deliver(
    gateways: Sequence[str],
    api_key: str,
    body: dict[str, object],
    delivery: Delivery,
    *,
    detach_s: float = 30.0,
    key: str = "",
    patience_s: tuple[float, float] = (_TIMEOUT_S, _TIMEOUT_S),
    on_events: OnEvents | None = None,
) -> None:
    """Asks at the first of the URLs and fills `delivery` until the end. Raises RefusedError, TimeoutError.

    With an Idempotency-Key (`key`) it asks again where it knows no stream yet; a `delivery` with a stream_id
    is read from the start. `patience_s`: without an answer, and without a byte of a stream, for so long it
    tries the next gateway. `on_events` is called after each piece of the stream; OSError there breaks the
    connection, LeftError ends all.
    """
    content = json.dumps({**body, "stream": True}).encode()
    headers = f"Content-Type: application/json\r\nX-Headrace-Detach: {detach_s:g}\r\n"
    if key:
        headers += f"Idempotency-Key: {key}\r\n"
    turn = 0
    async with asyncio.timeout(_TIMEOUT_S):
        while delivery.done is None and delivery.error is None:
            gateway = gateways[turn % len(gateways)]
            if turn and not delivery.stream_id and not key:
                raise RefusedError("the connection broke before the stream had a name")
            if delivery.stream_id:
                ask, content = f"GET /v1/streams/{delivery.stream_id}", b""
                headers = "" if delivery.position < 0 else f"Last-Event-ID: {delivery.position}\r\n"
            else:
                ask = "POST /v1/generate"
            try:
                await _read(gateway, ask, headers, api_key, content, delivery, patience_s, on_events)
            except _BROKEN:
                delivery.broke_at = delivery.broke_at or time.perf_counter()
                await asyncio.sleep(_AGAIN_S)
            turn += 1


async def _read(
    gateway: str,
    ask: str,
    headers: str,
    api_key: str,
    content: bytes,
    delivery: Delivery,
    patience_s: tuple[float, float],
    on_events: OnEvents | None,
) -> None:
    at = urlsplit(gateway)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        head = f"{ask} HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {api_key}\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        async with asyncio.timeout(patience_s[bool(delivery.stream_id)]):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        if not answer.startswith("HTTP/1.1 200"):
            if answer.startswith("HTTP/1.1 503") and delivery.stream_id:
                raise EOFError  # that gateway is going, or still coming
            what = answer + (await reader.read(2_000)).decode(errors="replace")
            raise RefusedError(what, int(answer.split()[1]))
        named = dict(line.split(": ", 1) for line in answer.lower().split("\r\n")[1:] if line)
        if not delivery.stream_id:
            delivery.request_id = bytes.fromhex(named["x-request-id"])
            # The case of an id counts.
            begin = answer.lower().index("x-headrace-stream: ") + len("x-headrace-stream: ")
            delivery.stream_id = answer[begin : answer.index("\r\n", begin)]
        pending = b""
        while True:
            async with asyncio.timeout(patience_s[1]):
                size = int((await reader.readuntil(b"\r\n")).strip(), 16)
                chunk = (await reader.readexactly(size + 2))[:-2]
            if not size:
                if delivery.done is None and delivery.error is None:
                    raise EOFError
                return
            *events, pending = (pending + chunk).split(b"\n\n")
            now = time.perf_counter()
            for event in events:
                _take(event, delivery, now)
            if on_events is not None and delivery.done is None and delivery.error is None:
                await on_events()
    finally:
        writer.close()


def _take(event: bytes, delivery: Delivery, now: float) -> None:
    fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if not line.startswith(b":"))
    if b"data" not in fields:
        return
    data = json.loads(fields[b"data"])
    if data["type"] == "error":
        if data["error"].get("code") == "shutting_down":
            raise EOFError  # it goes on elsewhere
        delivery.error = data["error"]
        return
    delivery.position = int(fields[b"id"])
    if delivery.broke_at is not None:
        delivery.away_ms.append((now - delivery.broke_at) * 1000)
        delivery.broke_at = None
    if data["type"] == "done":
        delivery.done = data
    else:
        delivery.text.append(data["text"])
        delivery.at.append(now)
