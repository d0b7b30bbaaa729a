"""What uploads and downloads ask of a gateway: memory that is bounded; and what is told when the object store
is away."""

import contextlib
import json
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from schemas.stored_files import new_file_id
from tests.file_uploads import (
    END,
    FILE,
    FORM_TYPE,
    LARGE,
    LINE,
    PURPOSE,
    UPLOAD_BYTES,
    begin_upload,
    client_of,
    create,
    no_requests,
    until,
    until_idle,
)
from tests.http_stand import Connection, head, http_stand
from tests.s3_server import s3_server


@pytest.fixture
def silent_store() -> Iterator[str]:
    """Where a store could be, something listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_REGION", "us-east-1")
        yield "s3://bucket"


@pytest.fixture
def broken_folder(tmp_path: Path) -> str:
    """A store's folder in which there is no place for a tenant's."""
    (tmp_path / "files").write_bytes(b"")
    return str(tmp_path)


@pytest.mark.parametrize("away", ["silent_store", "broken_folder"])
def test_a_store_that_is_away_is_told_in_time(request: pytest.FixtureRequest, away: str) -> None:
    url = request.getfixturevalue(away)
    with http_stand(no_requests, object_store=url, store_timeout_s=0.3) as stand:
        with client_of(stand) as client:
            asks = (
                lambda: create(client),
                lambda: create(client, LARGE),
                client.files.list,
                lambda: client.files.retrieve(new_file_id(1)),
            )
            for ask in asks:
                with pytest.raises(openai.InternalServerError, match="object store does not") as refusal:
                    ask()
                assert refusal.value.status_code == 503
                assert refusal.value.response.headers["retry-after"] == "5"
        until_idle(stand)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_store_that_goes_away_in_the_middle_leaves_no_file(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(s3_server()) if kind == "s3" else None
        url = s3.url if s3 is not None else str(tmp_path / "objects")
        settings = {"object_store": url, "store_timeout_s": 0.5, "max_file_lines": 200_000}
        stand = stack.enter_context(http_stand(no_requests, **settings))
        connection = stack.enter_context(Connection(stand))
        begin_upload(connection)
        if s3 is not None:
            s3.server.stop()
        else:
            until(lambda: any(path.is_file() for path in Path(url).rglob("*")))
            shutil.rmtree(url)
            Path(url).write_bytes(b"")
        connection.send(LARGE[11_000_000:UPLOAD_BYTES] + END)
        status, headers, body = connection.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "object_store_unavailable")
        assert headers["retry-after"] == "5"
        until_idle(stand)
    if s3 is None:
        assert Path(url).read_bytes() == b""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    piece = (LINE * 700)[:65_536]
    most = 200_000_000 // len(piece)
    settings = {"max_file_lines": 10_000_000, "object_store": str(tmp_path)}
    with http_stand(no_requests, **settings) as stand, Connection(stand) as connection:
        length = len(PURPOSE + FILE + END) + most * len(piece)
        connection.send(head("POST", "/v1/files", FORM_TYPE, f"content-length: {length}"))
        connection.send(PURPOSE + FILE)
        for _ in range(most // 10):
            connection.send(piece)
        begin = peak = resident_bytes()
        for _ in range(most - most // 10):
            connection.send(piece)
            peak = max(peak, resident_bytes())
        connection.send(END)
        status, _, body = connection.answer()
        assert (status, json.loads(body)["bytes"]) == (200, most * len(piece))
        assert peak - begin < 20 << 20
        # And what is read of it.
        connection.send(head("GET", f"/v1/files/{json.loads(body)['id']}/content"))
        connection.until(b"\r\n\r\n")
        begin = peak = resident_bytes()
        for _ in range(most - 2):
            assert connection.socket.recv(len(piece), socket.MSG_WAITALL)
            peak = max(peak, resident_bytes())
        assert peak - begin < 20 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
