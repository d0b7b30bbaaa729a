"""The sweeper over a folder and over S3: what has had its time goes, all else stays."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import obstore
import pytest
from obstore.store import ObjectStore

from schemas.object_store import open_store
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
from streams.ledger.sweeper import Sweeper, Swept, keep_swept
from tests.s3_server import s3_server

TENANTS = ("acme", "cheap")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield open_store(str(request.getfixturevalue("tmp_path")))
    else:
        with s3_server() as s3:
            yield open_store(s3.url)


def put(store: ObjectStore, *names: str) -> list[str]:
    for name in names:
        obstore.put(store, name, b"x")
    return list(names)


def put_file(store: ObjectStore, tenant: str, file_id: str, names: list[str], expires_at: int) -> list[str]:
    file = StoredFile(
        id=file_id,
        tenant=tenant,
        filename="a",
        purpose="batch",
        bytes=len(names),
        created_at=0,
        expires_at=expires_at,
        parts=[ObjectPart(name, 1) for name in names],
    )
    obstore.put(store, noted(tenant, file_id), msgspec.json.encode(file))
    return [*put(store, *names), noted(tenant, file_id)]


def names(store: ObjectStore) -> set[str]:
    return {meta["path"] for metas in obstore.list(store) for meta in metas}


async def test_what_has_had_its_time_goes_and_all_else_stays(store: ObjectStore) -> None:
    now = time.time_ns() // 1_000_000
    kept: list[str] = put(store, "elsewhere/a", "files/acme/other")
    expired: list[str] = []
    orphans: list[str] = []
    for tenant in TENANTS:
        for expires_at, to in ((now + 9 * DAY_MS, kept), (now + DAY_MS, expired)):
            file_id, batch_id = new_file_id(now), new_batch_id(now)
            to += put_file(store, tenant, file_id, [content(tenant, file_id)], expires_at)
            parts = [part_name(tenant, batch_id, "output", n, 7) for n in range(3)]
            to += put_file(store, tenant, result_file_id(batch_id, "output"), parts, expires_at)
        orphans += put(store, content(tenant, new_file_id(now)))
        kept += put(store, part_name(tenant, new_batch_id(now), "error", 0, 7))  # one that runs
    orphans += put(store, part_name(TENANTS[1], new_batch_id(1), "error", 0, 7))  # of a batch of 1970
    sweeper = Sweeper(store)
    assert await sweeper.sweep(now + DAY_MS - 60_000) == Swept(0, 0)
    assert names(store) == {*kept, *expired, *orphans}
    assert await sweeper.sweep(now + DAY_MS + 60_000) == Swept(4, 3)
    assert names(store) == set(kept)
    assert await sweeper.sweep(now + DAY_MS + 60_000) == Swept(0, 0)


async def test_a_part_of_an_earlier_life_goes_with_the_day(store: ObjectStore) -> None:
    now = time.time_ns() // 1_000_000
    batch_id = new_batch_id(now)
    part, other = (part_name("acme", batch_id, "output", 0, epoch) for epoch in (7, 6))
    kept = put_file(store, "acme", result_file_id(batch_id, "output"), [part], now + 9 * DAY_MS)
    put(store, other)
    assert await Sweeper(store).sweep(now) == Swept(0, 0)
    assert await Sweeper(store).sweep(now + DAY_MS + 60_000) == Swept(0, 1)
    assert names(store) == set(kept)


async def test_a_note_that_cannot_be_read_stops_nothing(store: ObjectStore) -> None:
    now = time.time_ns() // 1_000_000
    broken = new_file_id(now)
    kept = put(store, noted("acme", broken), content("acme", broken))
    file_id = new_file_id(now)
    put_file(store, "acme", file_id, [content("acme", file_id)], now)
    assert await Sweeper(store).sweep(now + 2 * DAY_MS) == Swept(1, 0)
    assert names(store) == set(kept)


async def test_one_process_sweeps_and_goes_on_after_a_failure(store: ObjectStore) -> None:
    now = time.time_ns() // 1_000_000
    file_id = new_file_id(now)
    put_file(store, "acme", file_id, [content("acme", file_id)], now - 1)
    ours = False
    sweeping = asyncio.create_task(keep_swept(store, 0.1, lambda: ours, look_s=0.02))
    await asyncio.sleep(0.2)
    assert names(store)
    ours = True
    deadline = time.monotonic() + 20
    while await asyncio.to_thread(names, store):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    sweeping.cancel()
    with suppress(asyncio.CancelledError):
        await sweeping
