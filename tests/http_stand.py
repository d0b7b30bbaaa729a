"""The gateway's HTTP server on loopback, as in production but for Kafka; and a client that speaks bytes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from gateway.http_server import HttpServer, listen
from gateway.owned_request import OwnedRequest
from tests.gateway_factories import KEY, Stand

_WAIT_S = 20.0


class HttpStand:
    """`on_request(stand, owned)` is admission and worker; it runs in the server's thread."""

    def __init__(self, on_request: Callable[[Stand, OwnedRequest], None], **changes: Any) -> None:
        self._on_request = on_request
        self._changes = changes
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-stand")

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(_WAIT_S)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()

    @property
    def connections(self) -> list[socket.socket]:
        """The server's ends of them."""
        found: Any = self._server.server_state.connections
        return [each.transport.get_extra_info("socket") for each in found]

    def do(self, what: Callable[[Stand], None]) -> None:
        """In the server's thread, soon."""
        self._loop.call_soon_threadsafe(what, self.stand)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stand = stand = Stand(**self._changes)
        stand.outbox.on_request = lambda owned: self._on_request(stand, owned)
        listener = listen(stand.serving.config)
        self.port: int = listener.getsockname()[1]
        self._server = HttpServer(stand.serving)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self._ready.set()
        await serving
        stand.serving.tokenizing.shutdown(wait=False)


@contextlib.contextmanager
def http_stand(on_request: Callable[[Stand, OwnedRequest], None], **changes: Any) -> Iterator[HttpStand]:
    stand = HttpStand(on_request, **changes)
    stand.start()
    try:
        yield stand
    finally:
        stand.stop()


class Connection:
    """A TCP connection. What is received and not yet returned is kept."""

    def __init__(self, stand: HttpStand) -> None:
        self.socket = socket.create_connection(("127.0.0.1", stand.port), timeout=_WAIT_S)
        self._kept = b""

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until(self, mark: bytes) -> bytes:
        """What comes, up to `mark`."""
        while mark not in self._kept:
            piece = self.socket.recv(65_536)
            assert piece, f"the connection ended: {self._kept!r}"
            self._kept += piece
        found, _, self._kept = self._kept.partition(mark)
        return found + mark

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """A whole response: status, headers with lower-case names, body."""
        first, *lines = self.until(b"\r\n\r\n").decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", "0"))
        while len(self._kept) < length:
            piece = self.socket.recv(65_536)
            assert piece, f"the body ended early: {self._kept!r}"
            self._kept += piece
        body, self._kept = self._kept[:length], self._kept[length:]
        return int(first.split()[1]), headers, body

    def rest(self) -> bytes:
        """All that comes until the server closes."""
        while piece := self.socket.recv(65_536):
            self._kept += piece
        found, self._kept = self._kept, b""
        return found


def post(path: str, body: bytes, *lines: str) -> bytes:
    """The bytes of a request with a key."""
    return head("POST", path, f"content-length: {len(body)}", *lines) + body


def head(method: str, path: str, *lines: str, version: str = "1.1") -> bytes:
    every = (f"{method} {path} HTTP/{version}", "host: x", f"authorization: Bearer {KEY}", *lines)
    return "".join(f"{line}\r\n" for line in (*every, "")).encode()
