"""/v1/files, as OpenAI's API has it: what batches read, and what they have written."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from gateway import sse
from gateway.api.asking import asked
from gateway.api.file_form import FORM_BYTES, FileForm
from gateway.api.pages import openai_page, query_of
from gateway.api.reading import check_encoding
from gateway.download import send_pieces
from gateway.exchange import Exchange
from gateway.file_store import READ_BYTES, WRITE_BYTES
from gateway.idempotency import refuse_key
from gateway.serving import Serving
from schemas.api.batches import PURPOSE
from schemas.api.errors import ApiError, bad_field
from schemas.clock import epoch_ms
from schemas.records import Tenant
from schemas.stored_files import (
    FILE_PREFIX,
    KEPT_MS,
    ObjectPart,
    StoredFile,
    content,
    is_id,
    new_file_id,
)

log = logging.getLogger(__name__)

FILES_URL = "/v1/files"
PURPOSES = (PURPOSE, "batch_output")
ORDERS = ("desc", "asc")
# OpenAI's pages have up to 10,000, and so many by default; here each is a read of the store.
_DEFAULT_PAGE, _MAX_PAGE = 1_000, 10_000
_NOTES_AT_ONCE = 16


async def upload(serving: Serving, exchange: Exchange) -> None:
    """Streams the file into the object store. What does not come to its end leaves nothing there."""
    config = serving.config
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    check_encoding(exchange)
    refuse_key(exchange.headers)
    form = FileForm(exchange.headers.get(b"content-type", b""), config.max_file_bytes, config.max_file_lines)
    limit = config.max_file_bytes + FORM_BYTES
    created_at = epoch_ms()
    file_id = new_file_id(created_at)
    name = content(tenant.name, file_id)

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in exchange.body_pieces(limit, config.body_timeout_s):
            for each in form.feed(piece):
                yield each
        # Here, that what is refused at its end is not written.
        form.finish()

    with serving.bodies.one() as take:
        take(WRITE_BYTES)
        await serving.files.write(name, pieces())
        said = form.finish()
        kept_ms = KEPT_MS if said.expires_after_s is None else said.expires_after_s * 1000
        file = StoredFile(
            id=file_id,
            tenant=tenant.name,
            filename=said.filename,
            purpose=PURPOSE,
            bytes=said.bytes,
            created_at=created_at,
            expires_at=created_at + kept_ms,
            parts=[ObjectPart(name, said.bytes)],
            lines=said.lines,
        )
        await serving.files.note(file)
    log.info(
        "file uploaded",
        extra={
            "request_id": exchange.request_id.hex(),
            "tenant": tenant.name,
            "file": file_id,
            "bytes": said.bytes,
            "ms": round(exchange.elapsed_s * 1000, 1),
        },
    )
    await exchange.respond(200, sse.to_json(_shown(file)))


async def list_files(serving: Serving, exchange: Exchange) -> None:
    """Without the output of batches that have not ended: their files grow yet."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    limit, after, *_ = openai_page(exchange, _DEFAULT_PAGE, _MAX_PAGE, "order", "purpose")
    query = query_of(exchange, "limit", "after", "order", "purpose")
    newest_first = _one_of(query, "order", ORDERS) != "asc"
    purpose = _one_of(query, "purpose", PURPOSES)
    if after and not is_id(after, FILE_PREFIX):
        raise bad_field("after", f"{after[:80]!r} is no id of a file")
    ids = await serving.files.ids(tenant.name)
    if newest_first:
        ids.reverse()
    if after:
        # It need not be there any more: ids are in the order of time.
        ids = [each for each in ids if (each < after if newest_first else each > after)]
    files = await _first(serving, tenant, ids, purpose, limit + 1)
    shown = files[:limit]
    page = {
        "object": "list",
        "data": [_shown(file) for file in shown],
        "has_more": len(files) > limit,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }
    await exchange.respond(200, sse.to_json(page))


def _one_of(query: dict[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    chosen = query.get(name)
    if chosen is not None and chosen not in choices:
        raise bad_field(name, f"one of {', '.join(choices)}, not {chosen[:40]!r}")
    return chosen


async def _first(
    serving: Serving, tenant: Tenant, ids: list[str], purpose: str | None, count: int
) -> list[StoredFile]:
    """The first `count` of `ids` that have not expired and are for `purpose`."""
    now = epoch_ms()
    found: list[StoredFile] = []
    for start in range(0, len(ids), _NOTES_AT_ONCE):
        some = ids[start : start + _NOTES_AT_ONCE]
        files = await asyncio.gather(*(serving.files.find(tenant.name, each, now) for each in some))
        found += [file for file in files if file is not None and purpose in (None, file.purpose)]
        if len(found) >= count:
            break
    return found[:count]


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    file = await _asked_for(serving, exchange)
    await exchange.respond(200, sse.to_json(_shown(file)))


async def read_content(serving: Serving, exchange: Exchange) -> None:
    """The bytes, as they are. Of a batch that runs, as far as it has come."""
    file = await _asked_for(serving, exchange)
    headers = [(b"content-type", b"application/x-jsonl"), (b"content-length", b"%d" % file.bytes)]
    with serving.bodies.one() as take:
        take(READ_BYTES)
        try:
            pieces = serving.files.read(file.parts)
            await send_pieces(exchange, headers, pieces, serving.config.write_timeout_s)
        except FileNotFoundError as e:
            log.warning("a file lacks a part", extra={"file": file.id, "error": f"{e!r:.300}"})
            raise _not_found() from None


async def delete(serving: Serving, exchange: Exchange) -> None:
    tenant, file_id = await _named(serving, exchange)
    batch_id = await asked(serving.stores.batch_using(tenant.name, file_id))
    if batch_id is not None:
        message = f"{batch_id} uses the file; it has not ended"
        raise ApiError(409, "file_in_use", message)
    file = await serving.files.find(tenant.name, file_id, epoch_ms())
    if file is None:
        raise _not_found()
    await serving.files.delete(file)
    await exchange.respond(200, sse.to_json({"id": file_id, "object": "file", "deleted": True}))


async def _named(serving: Serving, exchange: Exchange) -> tuple[Tenant, str]:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    file_id: str = exchange.scope["path_params"]["id"]
    if not is_id(file_id, FILE_PREFIX):
        raise _not_found()
    return tenant, file_id


async def _asked_for(serving: Serving, exchange: Exchange) -> StoredFile:
    """The file in the path. Raises ApiError 404 for one that is not there, or another tenant's."""
    tenant, file_id = await _named(serving, exchange)
    files, now = serving.files, epoch_ms()
    file = await files.find(tenant.name, file_id, now)
    if file is None:
        file = await asked(serving.stores.result_file(tenant.name, file_id))
    if file is None:
        # The batch may have ended in between, and noted it.
        file = await files.find(tenant.name, file_id, now)
    if file is None:
        raise _not_found()
    return file


def _not_found() -> ApiError:
    return ApiError(404, "file_not_found", "there is no such file")


def _shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at // 1000,
        "expires_at": file.expires_at // 1000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
