"""Uploads to /v1/files, by OpenAI's client and byte by byte."""

import io
import time
from collections.abc import Callable
from typing import Any

import openai

from gateway.owned_request import OwnedRequest
from tests.gateway_factories import KEY, Stand
from tests.http_stand import Connection, HttpStand, head

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/generate","body":{"model":"simulated","prompt":"x"}}\n'
# More than two parts of a write, and no whole number of pieces.
LARGE = LINE * (13_000_000 // len(LINE))
BOUNDARY = "cut"
FORM_TYPE = f"content-type: multipart/form-data; boundary={BOUNDARY}"
PURPOSE = b'--cut\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--cut\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
UPLOAD_BYTES = 12_500_000
END = b"\r\n--cut--\r\n"
_TIMEOUT_S = 20


def no_requests(stand: Stand, owned: OwnedRequest) -> None:
    raise AssertionError("files are no requests")


def client_of(stand: HttpStand, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"http://127.0.0.1:{stand.port}/v1", max_retries=0)


def create(client: openai.OpenAI, text: bytes = LINE, **options: Any) -> openai.types.FileObject:
    return client.files.create(file=("lines.jsonl", io.BytesIO(text)), purpose="batch", **options)


def begin_upload(connection: Connection) -> None:
    """The first 11 MB, more than two parts of a write, of UPLOAD_BYTES and END."""
    connection.send(
        head("POST", "/v1/files", FORM_TYPE, f"content-length: {UPLOAD_BYTES + len(PURPOSE + FILE + END)}")
    )
    connection.send(PURPOSE + FILE + LARGE[:11_000_000])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_idle(stand: HttpStand) -> None:
    until(lambda: not stand.stand.serving.in_flight.count)
    assert stand.stand.serving.bodies.held == 0
