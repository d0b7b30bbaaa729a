"""Over TCP: events leave one by one, and no bytes on a connection make the server fail."""

import logging
import queue
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.owned_request import OwnedRequest
from tests.gateway_factories import Stand
from tests.http_stand import Connection, HttpStand, head, http_stand, post

BODY = b'{"model":"simulated","prompt":"hi","max_tokens":2,"stream":true}'
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def test_what_there_is_leaves_at_once() -> None:
    """Each piece is asked for only after the one before it has come."""
    arrived: queue.Queue[OwnedRequest] = queue.Queue()
    with http_stand(lambda stand, owned: arrived.put(owned)) as stand, Connection(stand) as connection:
        connection.send(LIVE)
        connection.answer()
        (accepted,) = stand.connections
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.send(head("POST", "/v1/generate", f"content-length: {len(BODY)}", "expect: 100-continue"))
        assert connection.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(BODY)
        request = arrived.get(timeout=10).request
        stand.do(lambda it: it.dispatched(request))
        assert b" 200 OK" in connection.until(b"\r\n\r\n")
        for position, letter in enumerate(b"ok"):
            last = "length" if position else None
            stand.do(lambda it, p=position, c=letter, last=last: it.tokens(request, p, [c], last))  # type: ignore[misc]
            assert b'"text":"%c"' % letter in connection.until(b"\n\n\r\n")
        stand.do(lambda it: it.complete(request, 2))
        assert b'"type":"done"' in connection.until(b"0\r\n\r\n")


def serve(stand: Stand, owned: OwnedRequest) -> None:
    stand.dispatched(owned.request)
    stand.tokens(owned.request, 0, b"ok", "length")
    stand.complete(owned.request, 2)


@pytest.fixture(scope="module")
def stand() -> Iterator[HttpStand]:
    with http_stand(serve, max_header_bytes=4_096) as stand:
        yield stand


CHUNKED = head("POST", "/v1/messages", "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\nx: y\r\n\r\n"
GOOD = [
    post("/v1/generate", BODY),
    CHUNKED,
    LIVE * 3,
    head("GET", "/v1/streams/x?token=%41"),
    head("GET", "/v1/models/a%2fb", "connection: upgrade", "upgrade: h2c"),
    post("/v1/generate", BODY, "connection: upgrade", "upgrade: websocket") + LIVE,
]
# fmt: off
PIECES = [b"\r\n", b"\n", b"\r", b":", b" ", b"\0", b"\xff", b"%", b"%00", b"HTTP/1.0",
          b"content-length: 9\r\n", b"transfer-encoding: chunked\r\n", b"upgrade: x\r\n", b"x" * 5_000,
          b"ffffffffffffffff"]
# fmt: on


@st.composite
def broken(draw: st.DrawFn) -> list[bytes]:
    """Good requests with some bytes changed, in pieces."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(GOOD), min_size=1, max_size=2))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut" if len(data) > 20:
                del data[at : at + draw(st.integers(1, 10))]
            case _:
                data[at:at] = draw(st.sampled_from(PIECES))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(broken())
def test_no_bytes_make_the_server_fail(
    stand: HttpStand, caplog: pytest.LogCaptureFixture, pieces: list[bytes]
) -> None:
    with Connection(stand) as connection:
        try:
            for piece in pieces:
                connection.send(piece)
            connection.socket.shutdown(socket.SHUT_WR)
            answer = connection.rest()
        except OSError:
            answer = b""  # refused while it was still being sent
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 5" not in answer
    failures = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not failures, failures[0].getMessage()


def test_it_lives(stand: HttpStand) -> None:
    with Connection(stand) as connection:
        connection.send(LIVE)
        assert connection.answer()[0] == 200
    assert stand.stand.serving.in_flight.count == 0
    assert stand.stand.serving.bodies.held == 0
