"""/v1/files over HTTP and real object stores: a folder, and S3 as moto serves it."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import obstore
import openai
import pytest

from gateway.file_store import FileStore
from schemas.object_store import open_store
from schemas.records import BatchJob, BatchPart, BatchState
from schemas.stored_files import (
    ObjectPart,
    StoredFile,
    content,
    new_batch_id,
    new_file_id,
    noted,
    part_name,
    result_file_id,
)
from schemas.topics import DAY_MS
from tests.file_uploads import (
    END,
    FILE,
    FORM_TYPE,
    LARGE,
    LINE,
    PURPOSE,
    begin_upload,
    client_of,
    create,
    no_requests,
    until,
    until_idle,
)
from tests.gateway_factories import FREE_KEY, KEY
from tests.http_stand import Connection, HttpStand, head, http_stand
from tests.s3_server import s3_server, unfinished_uploads


@pytest.fixture(scope="module", params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path_factory.mktemp("objects") / "made" / "later")
    else:
        with s3_server() as s3:
            yield s3.url


@pytest.fixture(scope="module")
def stand(url: str) -> Iterator[HttpStand]:
    settings = {"max_file_bytes": len(LARGE), "max_file_lines": 200_000, "body_timeout_s": 0.5}
    with http_stand(no_requests, object_store=url, **settings) as stand:
        yield stand


@pytest.fixture
def client(stand: HttpStand, url: str) -> Iterator[openai.OpenAI]:
    """Before and after each test there is nothing in the store."""
    assert not objects(url)
    with client_of(stand) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
    assert not objects(url)


def objects(url: str) -> list[str]:
    found = [meta["path"] for metas in obstore.list(open_store(url)) for meta in metas]
    return found + (unfinished_uploads() if url.startswith("s3:") else [])


@pytest.mark.parametrize("text", [LINE, b"\0\r\n--\xff", LARGE], ids=["line", "bytes", "large"])
def test_the_official_client_gets_back_what_it_sent(client: openai.OpenAI, url: str, text: bytes) -> None:
    file = create(client, text)
    assert (file.object, file.status, file.purpose) == ("file", "processed", "batch")
    assert (file.filename, file.bytes) == ("lines.jsonl", len(text))
    assert abs(file.created_at - time.time()) < 60
    assert file.expires_at == file.created_at + 30 * 86_400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == text
    assert set(objects(url)) == {noted("acme", file.id), content("acme", file.id)}
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(file.id)


def test_how_long_it_is_kept_is_the_clients_to_say(client: openai.OpenAI) -> None:
    file = create(client, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert file.expires_at == file.created_at + 3_600


def test_another_tenants_file_is_none(client: openai.OpenAI, stand: HttpStand) -> None:
    file = create(client)
    with client_of(stand, FREE_KEY) as other:
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError, match="no such file"):
                ask(file.id)
        assert not list(other.files.list())
    assert client.files.retrieve(file.id) == file


@pytest.mark.parametrize("file_id", ["x", "file-", f"file-{'g' * 32}", "..%2F..%2Fa", f"file-{'0' * 33}"])
def test_what_is_no_id_is_no_file(client: openai.OpenAI, stand: HttpStand, file_id: str) -> None:
    answer = httpx.get(f"{client.base_url}files/{file_id}", headers={"x-api-key": KEY})
    assert answer.status_code == 404


def test_pages_are_in_the_order_of_time(client: openai.OpenAI) -> None:
    ids = [create(client).id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=2, after=ids[3], purpose="batch")
    assert ([file.id for file in page.data], page.has_more) == ([ids[2], ids[1]], True)
    client.files.delete(ids[2])
    last = client.files.list(limit=2, after=ids[2])  # gone, and yet a place
    assert ([file.id for file in last.data], last.has_more) == ([ids[1], ids[0]], False)
    assert not client.files.list(purpose="batch_output").data


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("purpose=vision", "purpose"),
        ("before=x", "before"),
    ],
)
def test_what_a_list_cannot_be_asked_is_named(client: openai.OpenAI, query: str, param: str) -> None:
    answer = httpx.get(f"{client.base_url}files?{query}", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (PURPOSE + FILE + LARGE + b"x" + END, 413, "body_too_large"),
        (PURPOSE + FILE + b"\n" * 200_001 + END, 400, "too_many_lines"),
        (PURPOSE + FILE + END, 400, "invalid_value"),
        (FILE + LARGE + b"\r\n" + PURPOSE.replace(b"batch", b"vision") + END[2:], 400, "invalid_value"),
        (FILE + LARGE + END, 400, "missing_field"),
        (PURPOSE + FILE + LARGE, 400, "invalid_multipart"),
        (LARGE, 400, "invalid_multipart"),
    ],
    ids=["bytes", "lines", "empty", "purpose", "no-purpose", "no-end", "no-form"],
)
def test_what_is_refused_leaves_nothing(
    stand: HttpStand, client: openai.OpenAI, url: str, body: bytes, status: int, code: str
) -> None:
    with Connection(stand) as connection:
        connection.send(head("POST", "/v1/files", FORM_TYPE, f"content-length: {len(body)}"))
        with contextlib.suppress(ConnectionError):  # refused before all was sent
            connection.send(body)
        answer = connection.answer()
    assert (status, code) == (answer[0], json.loads(answer[2])["error"]["code"])
    until_nothing_is_left(url)


def test_a_client_that_goes_away_leaves_nothing(stand: HttpStand, client: openai.OpenAI, url: str) -> None:
    with Connection(stand) as connection:
        begin_upload(connection)
    until_idle(stand)
    until_nothing_is_left(url)


def test_a_client_that_sends_no_more_is_told_so_and_leaves_nothing(
    stand: HttpStand, client: openai.OpenAI, url: str
) -> None:
    with Connection(stand) as connection:
        begin_upload(connection)
        for _ in range(30):  # a byte now and then is no progress
            with contextlib.suppress(ConnectionError):
                connection.send(b"x")
            time.sleep(0.05)
        status, _, body = connection.answer()
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
    until_nothing_is_left(url)


def until_nothing_is_left(url: str) -> None:
    until(lambda: not objects(url))


async def put(url: str, file: StoredFile, *texts: bytes) -> None:
    """As a gateway or coordinator writes it."""
    store = FileStore(url, 10)

    async def pieces(text: bytes) -> AsyncIterator[bytes]:
        yield text

    for part, text in zip(file.parts, texts, strict=True):
        await store.write(part.name, pieces(text))
    await store.note(file)


def stored(parts: list[ObjectPart], created_at: int, expires_at: int, file_id: str = "") -> StoredFile:
    return StoredFile(
        id=file_id or new_file_id(created_at),
        tenant="acme",
        filename="out.jsonl",
        purpose="batch_output",
        bytes=sum(part.size for part in parts),
        created_at=created_at,
        expires_at=expires_at,
        parts=parts,
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_file_of_parts_is_read_as_one_as_far_as_they_count(client: openai.OpenAI, url: str) -> None:
    now = now_ms()
    batch_id = new_batch_id(now)
    names = [part_name("acme", batch_id, "output", n, 7) for n in range(3)]
    parts = [ObjectPart(name, size) for name, size in zip(names, (1_500_000, 0, 5), strict=True)]
    file_id = result_file_id(batch_id, "output")
    file = stored(parts, now, now + DAY_MS, file_id)
    asyncio.run(put(url, file, b"a" * 1_500_009, b"never", b"after and more"))
    assert client.files.content(file_id).read() == b"a" * 1_500_000 + b"after"
    assert [each.id for each in client.files.list(purpose="batch_output")] == [file_id]


def test_what_has_expired_is_gone_before_it_is_swept_away(client: openai.OpenAI, url: str) -> None:
    now = now_ms()
    file_id = new_file_id(now - 2_000)
    file = stored([ObjectPart(content("acme", file_id), 1)], now - 2_000, now - 1_000, file_id)
    asyncio.run(put(url, file, b"x"))
    assert not list(client.files.list())
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no such file"):
            ask(file_id)
    asyncio.run(FileStore(url, 10).delete(file))


def test_a_file_that_a_batch_uses_is_not_deleted_and_its_output_read_while_it_runs(
    client: openai.OpenAI, stand: HttpStand, url: str
) -> None:
    file = create(client)
    now = now_ms()
    batch_id = new_batch_id(now)
    asyncio.run(
        put(url, stored([ObjectPart(part_name("acme", batch_id, "output", 0, 3), 9)], now, now), b"123456789")
    )
    job = BatchJob(batch_id, "acme", "openai", file.id, "/v1/generate", None, DAY_MS, now)
    state = BatchState(batch_id, "acme", "in_progress", now + DAY_MS, output=[BatchPart(3, 6)])
    tell(stand, job, state)
    output_id = result_file_id(batch_id, "output")
    for used in (file.id, output_id):
        with pytest.raises(openai.ConflictError, match=batch_id) as refusal:
            client.files.delete(used)
        assert refusal.value.code == "file_in_use"
    assert client.files.content(output_id).read() == b"123456"
    running = client.files.retrieve(output_id)
    assert (running.purpose, running.bytes) == ("batch_output", 6)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(result_file_id(batch_id, "error"))
    state.status, state.ended_at = "completed", now
    tell(stand, job, state)
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):  # what has ended is as its note says
        client.files.retrieve(output_id)
    store = open_store(url)
    obstore.delete(store, objects(url))


def tell(stand: HttpStand, job: BatchJob, state: BatchState) -> None:
    async def told() -> None:
        book = (await stand.stand.serving.stores.batches()).book
        book.on_job(job)
        book.on_state(state)

    asyncio.run_coroutine_threadsafe(told(), stand._loop).result(20)


def test_who_does_not_take_a_file_is_given_up(client: openai.OpenAI, url: str) -> None:
    file = create(client, LARGE)
    with http_stand(no_requests, object_store=url, write_timeout_s=0.3) as stand:
        with Connection(stand) as connection:
            connection.send(head("GET", f"/v1/files/{file.id}/content"))
            connection.until(b"\r\n\r\n")
            until_idle(stand)
            assert len(connection.rest()) < len(LARGE)
        with Connection(stand) as connection:  # and one that leaves
            connection.send(head("GET", f"/v1/files/{file.id}/content"))
            connection.until(b"custom_id")
        until_idle(stand)


def test_a_file_whose_bytes_are_gone_is_none(client: openai.OpenAI, url: str) -> None:
    file = create(client)
    obstore.delete(open_store(url), content("acme", file.id))
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
