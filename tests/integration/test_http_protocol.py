"""The gateway's HTTP server, byte by byte over TCP: what is no good request, what is slow, who has gone."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.owned_request import OwnedRequest
from tests.gateway_factories import Stand
from tests.http_stand import Connection, HttpStand, head, http_stand, post

PATH = "/v1/generate"
BODY = b'{"model":"simulated","prompt":"hi","max_tokens":2}'
STREAM = b'{"model":"simulated","prompt":"hi","max_tokens":2,"stream":true}'
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
SOON_S = 0.3


def serve(stand: Stand, owned: OwnedRequest) -> None:
    request = owned.request
    stand.dispatched(request)
    stand.tokens(request, 0, b"ok", "length")
    stand.complete(request, 2)


def hold(stand: Stand, owned: OwnedRequest) -> None:
    stand.dispatched(owned.request)


@pytest.fixture(scope="module")
def stand() -> Iterator[HttpStand]:
    with http_stand(serve, max_header_bytes=4_096, max_headers=32, max_body_bytes=10_000) as stand:
        yield stand


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    assert len(headers["x-request-id"]) == 32
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),  # TLS
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "invalid_http"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "invalid_http"),
        (head("POST", PATH, "content-length: 2", "content-length: 3") + b"{}", 400, "invalid_http"),
        (head("POST", PATH, "content-length: -1") + b"{}", 400, "invalid_http"),
        (head("POST", PATH, "content-length: 2", "transfer-encoding: chunked"), 400, "invalid_http"),
        (head("POST", PATH, "transfer-encoding: gzip, deflate"), 400, "invalid_http"),
        (head("POST", PATH, f"x: {'y' * 4_096}"), 431, "headers_too_large"),
        (head("POST", PATH + "?" + "y" * 4_096), 431, "headers_too_large"),
        (head("POST", PATH, *["x: y"] * 33), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 500_000, 431, "headers_too_large"),  # and no end to it
    ],
)
def test_what_is_no_good_request_is_refused_and_closed(
    stand: HttpStand, data: bytes, status: int, code: str
) -> None:
    with Connection(stand) as connection:
        connection.send(data)
        answer = connection.answer()
        assert error_of(answer) == (status, code)
        assert answer[1]["connection"] == "close"
        assert connection.rest() == b""


def test_a_refusal_at_an_anthropic_path_has_its_shape(stand: HttpStand) -> None:
    with Connection(stand) as connection:
        connection.send(head("POST", "/v1/messages?beta=true", f"x: {'y' * 4_096}"))
        status, headers, body = connection.answer()
    assert (status, json.loads(body)["error"]["type"]) == (431, "request_too_large")
    assert json.loads(body)["request_id"] == headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("OPTIONS", PATH, "post"), ("PUT", "/v1/streams/x", "delete, get"), ("PROPFIND", "/metrics", "get")],
)
def test_other_methods_are_told_which_there_are(stand: HttpStand, method: str, path: str, allow: str) -> None:
    with Connection(stand) as connection:
        connection.send(head(method, path))
        answer = connection.answer()
        assert error_of(answer) == (405, "method_not_allowed")
        assert answer[1]["allow"] == allow


def test_a_connection_is_good_for_more_after_a_refusal(stand: HttpStand) -> None:
    refused = [
        (post(PATH, b"{"), 400),
        (post("/nothing", b"x" * 100), 404),
        (post(PATH, BODY, "content-encoding: gzip"), 415),
        (post(PATH, b"x" * 60_000), 413),
        (post(PATH, BODY), 200),
        (head("HEAD", PATH), 405),
    ]
    with Connection(stand) as connection:
        for data, status in refused[:-1]:
            connection.send(data)
            assert connection.answer()[0] == status
        connection.send(refused[-1][0])
        assert b" 405 " in connection.until(b"\r\n\r\n")
        connection.send(LIVE)
        assert connection.answer()[0] == 200


def test_the_connection_is_closed_on_demand(stand: HttpStand) -> None:
    for data in (post(PATH, BODY, "connection: close"), head("GET", "/v1/models", version="1.0")):
        with Connection(stand) as connection:
            connection.send(data)
            status, headers, _ = connection.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert connection.rest() == b""


def test_requests_that_are_sent_ahead_are_answered_in_turn(stand: HttpStand) -> None:
    with Connection(stand) as connection:
        connection.send(post(PATH, BODY) + LIVE + post(PATH, b"[") + LIVE + b"no HTTP\r\n\r\n")
        assert [connection.answer()[0] for _ in range(4)] == [200, 200, 400, 200]
        connection.rest()


def test_a_body_in_chunks_and_its_trailers(stand: HttpStand) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    with Connection(stand) as connection:
        for trailer in (b"", b"x-api-key: ignored\r\n"):
            connection.send(
                head("POST", PATH, "transfer-encoding: chunked") + chunks + b"0\r\n" + trailer + b"\r\n"
            )
            assert connection.answer()[0] == 200
        connection.send(head("POST", PATH, "transfer-encoding: chunked") + b"zz\r\n")
        assert error_of(connection.answer()) == (400, "invalid_http")


def test_trailers_are_no_headers(stand: HttpStand) -> None:
    with Connection(stand) as connection:
        key = head("GET", "/").split(b"authorization")[1].split(b"\r\n")[0]
        connection.send(
            b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nauthorization" + key + b"\r\n\r\n"
        )
        assert error_of(connection.answer()) == (401, "missing_api_key")


def test_expect_100_continue(stand: HttpStand) -> None:
    expect = "expect: 100-continue"
    with Connection(stand) as connection:
        connection.send(head("POST", PATH, f"content-length: {len(BODY)}", expect))
        assert connection.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(BODY)
        assert connection.answer()[0] == 200
        # Refused before the body: whether it comes is not known, so nothing else does.
        connection.send(head("POST", "/nothing", "content-length: 5", expect))
        answer = connection.answer()
        assert (*error_of(answer), answer[1]["connection"]) == (404, "not_found", "close")
        assert connection.rest() == b""


@pytest.mark.parametrize("offer", [("upgrade: h2c", "http2-settings: AAMAAABk"), ("upgrade: websocket",)])
def test_an_offer_of_another_protocol_is_not_taken(stand: HttpStand, offer: tuple[str, ...]) -> None:
    lines = ("connection: upgrade", *offer)
    with Connection(stand) as connection:
        data = post(PATH, BODY, *lines)
        connection.send(data[:-20])
        time.sleep(0.05)
        connection.send(data[-20:])
        assert connection.answer()[0] == 200
        chunked = head("POST", PATH, "transfer-encoding: chunked", *lines)
        connection.send(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + LIVE)
        assert [connection.answer()[0] for _ in range(2)] == [200, 200]
        connection.send(head("GET", "/health/live", *lines) + LIVE)
        assert [connection.answer()[0] for _ in range(2)] == [200, 200]


def drip(connection: Connection, first: bytes, data: bytes, stop: threading.Event) -> None:
    connection.send(first)
    for byte in data:
        if stop.wait(0.02):
            return
        try:
            connection.send(bytes([byte]))
        except OSError:
            return


@pytest.mark.parametrize(
    ("first", "dripped", "refusal"),
    [
        (b"GET /v1/mo", b"x" * 500, (408, "head_timeout")),
        (head("GET", PATH)[:-2], b"a: b\r\n" * 80, (408, "head_timeout")),
        (LIVE + b"GET /v1/mo", b"x" * 500, (408, "head_timeout")),
        (head("POST", PATH, "content-length: 500"), b"x" * 500, (408, "body_timeout")),
        (head("POST", PATH, "transfer-encoding: chunked"), b"1\r\nx\r\n" * 80, (408, "body_timeout")),
        (head("POST", "/nothing", "content-length: 500"), b"x" * 500, (404, "not_found")),
        (b"", b"\r\n" * 250, None),
        (b"", b"", None),
    ],
)
def test_who_drips_is_cut_off(
    slow_stand: HttpStand, first: bytes, dripped: bytes, refusal: tuple[int, str] | None
) -> None:
    stop = threading.Event()
    with Connection(slow_stand) as connection:
        writer = threading.Thread(target=drip, args=(connection, first, dripped, stop))
        writer.start()
        try:
            if first.startswith(LIVE):
                assert connection.answer()[0] == 200
            if refusal is not None:
                assert error_of(connection.answer()) == refusal
            with contextlib.suppress(ConnectionResetError):  # closed while bytes still came
                assert connection.rest() == b""
        finally:
            stop.set()
            writer.join()


@pytest.fixture(scope="module")
def slow_stand() -> Iterator[HttpStand]:
    with http_stand(serve, header_timeout_s=SOON_S, body_timeout_s=SOON_S) as stand:
        yield stand


def test_connections_and_requests_beyond_the_limits() -> None:
    limits: dict[str, Any] = {"max_connections": 3, "max_streams": 2, "max_streams_per_key": 1}
    with http_stand(hold, **limits) as stand, Connection(stand) as first, Connection(stand) as second:
        first.send(post(PATH, STREAM))
        first.until(b"\r\n\r\n")
        second.send(post(PATH, STREAM))
        answer = second.answer()
        assert (*error_of(answer), answer[1]["retry-after"]) == (503, "too_many_streams_of_key", "1")
        with Connection(stand) as third, Connection(stand) as fourth:
            third.send(LIVE)
            assert third.answer()[0] == 200
            fourth.send(LIVE)  # what watches the process is let in
            assert fourth.answer()[0] == 200
            fourth.send(post(PATH, STREAM))
            answer = fourth.answer()
            assert (*error_of(answer), answer[1]["retry-after"]) == (503, "too_many_connections", "1")
            assert fourth.rest() == b""
        assert stand.stand.serving.in_flight.count == 1
        first.socket.close()
        deadline = time.monotonic() + 10
        while stand.stand.serving.in_flight.count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Held:
    """Requests that are answered when the test says so."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.owned: list[OwnedRequest] = []
        self.dispatch = True

    def __call__(self, stand: Stand, owned: OwnedRequest) -> None:
        self.owned.append(owned)
        if self.dispatch:
            stand.dispatched(owned.request)
        self.arrived.set()

    def finish(self, stand: Stand) -> None:
        request = self.owned[-1].request
        if not self.dispatch:
            stand.dispatched(request)
        stand.tokens(request, 0, b"ok", "length")
        stand.complete(request, 2)


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("dispatch", [True, False])
def test_a_client_that_closes_its_side_gets_its_answer(body: bytes, dispatch: bool) -> None:
    held = Held()
    held.dispatch = dispatch
    with http_stand(held) as stand, Connection(stand) as connection:
        connection.send(post(PATH, body))
        if body is STREAM and dispatch:
            connection.until(b"\r\n\r\n")
        connection.socket.shutdown(1)
        assert held.arrived.wait(10)
        time.sleep(0.1)  # the probes look
        assert held.owned[-1].cancelled is None
        stand.do(held.finish)
        rest = connection.rest()
        assert b'"text":"ok"' in rest or (b'"text":"o"' in rest and b'"type":"done"' in rest)
        if body is BODY or not dispatch:
            assert rest.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        else:
            assert rest.startswith(b"3\r\n:\n\n\r\n")


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("dispatch", [True, False])
def test_a_client_that_has_gone_is_noticed_while_nothing_is_written(body: bytes, dispatch: bool) -> None:
    held = Held()
    held.dispatch = dispatch
    with http_stand(held) as stand:
        with Connection(stand) as connection:
            connection.send(post(PATH, body))
            assert held.arrived.wait(10)
            if body is STREAM and dispatch:
                connection.until(b"\r\n\r\n")
        deadline = time.monotonic() + 10
        while held.owned[-1].cancelled is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert held.owned[-1].cancelled == "disconnected"


def test_a_body_that_ends_early_is_no_request(stand: HttpStand) -> None:
    with Connection(stand) as connection:
        connection.send(head("POST", PATH, "content-length: 500") + BODY)
        connection.socket.shutdown(1)
        assert connection.rest() == b""
