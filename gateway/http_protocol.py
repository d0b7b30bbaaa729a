"""HTTP/1.1 on one connection: uvicorn's, bounded in size and time, and with every refusal in the API's shape.

What a connection is doing decides which time counts, so that none can be held for nothing:

| it waits for | at most |
|---|---|
| the head of a request, from its first byte on, or from the connect | `head_timeout_s` |
| the body | `body_timeout_s`, kept by who reads it, and here for what is left when the answer is out |
| the answer | what the request may take; a client that reads nothing is given up (reader.py) |
| the next request | `timeout_keep_alive` of uvicorn |
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway import stream_writer
from gateway.errors import whole_refusal
from schemas.api.errors import ApiError

EXCESS = "headrace.excess"
# Connections beyond the limit that are still told so; more are closed without a word.
_TOLD = 64
# TCP_INFO begins with the state of the connection; tcp_states.h of Linux.
_TCP_CLOSE = 7
_PROBES_S = (0.002, 0.01, 0.05, 0.25, 1.0, 5.0)
# Of a body that nobody has read yet.
_BODY_PIECE = 65_536
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_LINGER_S = 1.0
# A chunk of the response that holds a comment: between two events of a stream it says nothing.
_COMMENT_CHUNK = b"3\r\n:\n\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`head_bytes`: of the URL and all header lines. `on_status` is told what is refused here."""

    head_bytes: int
    headers: int
    head_timeout_s: float
    body_timeout_s: float
    connections: int
    on_status: Callable[[int], None]


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection. The ASGI scope's state holds EXCESS where there are more of them than are served."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
        writes: stream_writer.WriteBatch,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._writes = writes
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._in_head = False
        self._message_complete = True
        self._replaying_head = False
        self._head_bytes: int | None = None
        self._running: RequestResponseCycle | None = None
        self._excess = False
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.connections
        self._excess = beyond > 0
        if beyond > _TOLD:
            transport.abort()
            return
        self._arm(self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._probe is not None:
            self._probe.cancel()
        self._lose()
        super().connection_lost(exc)

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError as e:
            cause = e.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _no_http())
            return
        if self._in_head:
            # Not counted is the piece that the head begins in: the end of another message may be there too.
            self._head_bytes = 0 if self._head_bytes is None else self._head_bytes + len(data)
            if self._head_bytes > self._limits.head_bytes:
                self._refuse(_head_too_large(self._limits))
        elif self._idle and self.timeout_keep_alive_task is None:
            self._keep_alive()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            # An offer (h2c, websocket) that is not taken: the request is an ordinary one (RFC 9110, 7.8).
            # This parser has stopped behind its head; another goes on from a head that offers nothing.
            self.parser = httptools.HttpRequestParser(self)
            self._replaying_head = True
            try:
                self.parser.feed_data(_framing_of(self.headers))
            finally:
                self._replaying_head = False
            self._feed(data[e.args[0] :])

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may have gone, or only closed its side and wait for the answer.

        Which of the two, a write shows: who has gone answers it with a reset. Returns True to stay open.
        """
        running = self._running
        if running is None or self._idle or not self._message_complete:
            return self._lose()
        if self.scope["http_version"] != "1.1":
            return self._lose()
        self.cycle.keep_alive = False
        if not running.response_started:
            self.transport.write(_CONTINUE)
        elif running.chunked_encoding:  # a stream: whole answers have a length
            self.transport.write(_COMMENT_CHUNK)
        self._look(0)
        return True

    def _look(self, turn: int) -> None:
        """Closes the connection if the client has answered the last write with a reset."""
        self._probe = None
        if self.transport.is_closing():
            return
        if turn and _tcp_state(self.transport) == _TCP_CLOSE:
            self._lose()
            self.transport.abort()
        elif turn < len(_PROBES_S):
            self._probe = self.loop.call_later(_PROBES_S[turn], self._look, turn + 1)

    def _lose(self) -> bool:
        """Has those who answer write no more: uvloop tells of a connection's end after it has closed it."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
        scope[stream_writer.KEY] = stream_writer.StreamWriter(cycle, self._writes)
        super()._start_asgi_task(cycle, app)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if self._replaying_head:
            return
        super().on_message_begin()
        self._in_head, self._message_complete = True, False
        self._head_bytes = None
        if self._deadline is None:
            self._arm(self._limits.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        if not self._replaying_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers, which come behind the body, are no headers.
        if self._in_head and not self._replaying_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replaying_head:
            return
        limits = self._limits
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > limits.head_bytes:
            raise _head_too_large(limits)
        if len(self.headers) > limits.headers:
            message = f"there are {len(self.headers)} headers; {limits.headers} are the most"
            raise ApiError(431, "headers_too_large", message)
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise ApiError(400, "invalid_http", "Transfer-Encoding: only chunked is taken")
        if self._excess:
            self.scope["state"][EXCESS] = True
        super().on_headers_complete()
        self._in_head = False
        self._disarm()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self.cycle.body += body
            self.cycle.message_event.set()
            if len(self.cycle.body) > _BODY_PIECE:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # of the head alone
        self._message_complete = True
        self._disarm()
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._message_complete and not self._in_head:
            # The rest of a refused body: read and thrown away, that the client sees the refusal.
            self._unset_keepalive_if_required()
            self._arm(self._limits.body_timeout_s)

    # Time

    @property
    def _idle(self) -> bool:
        """Nothing is being received or answered."""
        return self._message_complete and (self.cycle is None or self.cycle.response_complete)

    def _keep_alive(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            handle = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = handle

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._in_head and not self._refused:
            seconds = self._limits.head_timeout_s
            self._refuse(ApiError(408, "head_timeout", f"the headers did not arrive within {seconds:g} s"))
        else:
            # Nothing was asked, or it was answered.
            self._lose()
            self.transport.close()

    # Refusals

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request, or no good one, and closes."""
        self._refused = True
        self._disarm()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self._in_head or self._message_complete:
                # Behind a request that is still answered; the answer is the last one here.
                cycle.keep_alive = False
                return
            # In its body: who reads that is told that no more comes.
            self._lose()
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        self._limits.on_status(error.status)
        url = getattr(self, "url", b"")
        headers, body = whole_refusal(error, url.partition(b"?")[0].decode("latin-1"))
        lines = [STATUS_LINE[error.status]]
        for name, value in (*self.server_state.default_headers, *headers):
            lines += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        # Closed at once, what the client still sends would have its kernel throw the answer away.
        self.transport.write_eof()
        self._arm(_LINGER_S)

    def send_400_response(self, msg: str) -> None:
        raise AssertionError("refusals go through _refuse")


def _no_http() -> ApiError:
    return ApiError(400, "invalid_http", "this is no HTTP/1.1 request")


def _head_too_large(limits: HttpLimits) -> ApiError:
    message = f"the URL and headers are larger than {limits.head_bytes} bytes"
    return ApiError(431, "headers_too_large", message)


def _framing_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head that says of the body what `headers` say, and nothing else."""
    kept = (name + b": " + value + b"\r\n" for name, value in headers if name in _FRAMING)
    return b"".join([b"POST / HTTP/1.1\r\n", *kept, b"\r\n"])


def _tcp_state(transport: asyncio.Transport) -> int:
    at: socket.socket = transport.get_extra_info("socket")
    return at.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
