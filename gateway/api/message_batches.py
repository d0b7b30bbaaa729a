"""/v1/messages/batches, as Anthropic's API has it (schemas/api/message_batches.py)."""

from collections.abc import AsyncIterator
from typing import Any

from gateway import sse
from gateway.api.asking import asked
from gateway.api.batches import ask_for_cancel, batch_log, find, start
from gateway.api.pages import anthropic_page
from gateway.api.reading import check_encoding
from gateway.batch_book import Batch
from gateway.download import send_pieces
from gateway.exchange import Exchange
from gateway.file_store import READ_BYTES, WRITE_BYTES
from gateway.idempotency import refuse_key
from gateway.message_lines import MessageLines
from gateway.serving import Serving
from schemas.api.batches import ANTHROPIC, PURPOSE
from schemas.api.errors import ApiError
from schemas.api.message_batches import message_batch, message_job, result_line
from schemas.clock import epoch_ms
from schemas.records import BatchState, Tenant
from schemas.stored_files import (
    KEPT_MS,
    Kind,
    ObjectPart,
    StoredFile,
    content,
    new_batch_id,
    new_file_id,
    object_parts,
    result_file_id,
)

MAX_BODY_BYTES = 256 << 20
_PAGE, _MAX_PAGE = 20, 1_000
_JSONL = (b"content-type", b"application/x-jsonl")
_PIECE_BYTES = 64 << 10


async def create(serving: Serving, exchange: Exchange) -> None:
    """The requests become the lines of an input file while they come in."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    check_encoding(exchange)
    refuse_key(exchange.headers)
    now_ms = epoch_ms()
    file_id = new_file_id(now_ms)
    name = content(tenant.name, file_id)
    config = serving.config
    lines = MessageLines(config.max_body_bytes)
    pieces = exchange.body_pieces(MAX_BODY_BYTES, config.body_timeout_s)
    with serving.bodies.one() as take:
        take(WRITE_BYTES + config.max_body_bytes)
        await serving.files.write(name, lines.read(pieces))
    file = StoredFile(
        id=file_id,
        tenant=tenant.name,
        filename="requests.jsonl",
        purpose=PURPOSE,
        bytes=lines.written,
        created_at=now_ms,
        expires_at=now_ms + KEPT_MS,
        parts=[ObjectPart(name, lines.written)],
        lines=lines.count,
    )
    try:
        await serving.files.note(file)
    except ApiError:
        await serving.files.delete(file)
        raise
    job = message_job(new_batch_id(now_ms), tenant.name, file_id, lines.count, now_ms)
    # Where this fails, the log may have it all the same: then its file is needed.
    await start(serving, job)
    await _respond(exchange, Batch(job))


async def list_batches(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    page = anthropic_page(exchange, _PAGE, _MAX_PAGE)
    log = await batch_log(serving)
    await asked(log.catch_up(tenant.name))
    batches = [b for b in log.book.newest_first(tenant.name) if b.job.form == ANTHROPIC]
    shown = page.cut(batches, [b.job.batch_id for b in batches])
    await exchange.respond(200, sse.to_json(shown.anthropic([_object(exchange, b) for b in shown.items])))


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    _, batch = await _batch(serving, exchange)
    await _respond(exchange, batch)


async def cancel(serving: Serving, exchange: Exchange) -> None:
    _, batch = await _batch(serving, exchange)
    await ask_for_cancel(serving, batch)
    await _respond(exchange, batch)


async def delete(serving: Serving, exchange: Exchange) -> None:
    """With its results and its requests. Raises ApiError 409 for one that has not ended."""
    tenant, batch = await _batch(serving, exchange)
    batch_id = batch.job.batch_id
    if not batch.ended or batch.state is None:
        raise ApiError(409, "batch_running", "the batch has not ended: cancel it first")
    kinds: tuple[Kind, ...] = ("output", "error")
    for file_id in (*(result_file_id(batch_id, kind) for kind in kinds), batch.job.input_file_id):
        file = await serving.files.find(tenant.name, file_id, epoch_ms())
        if file is not None:
            await serving.files.delete(file)
    for part in _parts(batch.state):
        await serving.files.remove(part.name)
    log = await batch_log(serving)
    await asked(log.delete(tenant.name, batch_id))
    await exchange.respond(200, sse.to_json({"id": batch_id, "type": "message_batch_deleted"}))


async def results(serving: Serving, exchange: Exchange) -> None:
    """A line a request, in no order. Raises ApiError 404 while it has not ended."""
    _, batch = await _batch(serving, exchange)
    if not batch.ended or batch.state is None:
        raise ApiError(404, "results_not_ready", "the batch has not ended: it has no results yet")
    told = _told(serving.files.read(_parts(batch.state)), exchange.request_id)
    with serving.bodies.one() as take:
        take(READ_BYTES)
        try:
            await send_pieces(exchange, [_JSONL], told, serving.config.write_timeout_s)
        except FileNotFoundError:
            raise ApiError(404, "file_not_found", "the results are kept no longer") from None


def _parts(state: BatchState) -> list[ObjectPart]:
    return [
        *object_parts(state.tenant, state.batch_id, "output", state.output),
        *object_parts(state.tenant, state.batch_id, "error", state.error_output),
    ]


async def _told(pieces: AsyncIterator[bytes], request_id: bytes) -> AsyncIterator[bytes]:
    """The results, in pieces of about 64 KiB."""
    rest, out, size = b"", [], 0
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            told = result_line(line, request_id)
            out.append(told)
            size += len(told)
            if size >= _PIECE_BYTES:
                yield b"".join(out)
                out, size = [], 0
    if out:
        yield b"".join(out)


async def _batch(serving: Serving, exchange: Exchange) -> tuple[Tenant, Batch]:
    """Raises ApiError 404, also for a batch that is not of messages."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    batch_id: str = exchange.scope["path_params"]["id"]
    return tenant, await find(serving, tenant, batch_id, frozenset({ANTHROPIC}))


async def _respond(exchange: Exchange, batch: Batch) -> None:
    await exchange.respond(200, sse.to_json(_object(exchange, batch)))


def _object(exchange: Exchange, batch: Batch) -> dict[str, Any]:
    return message_batch(batch.job, batch.state, batch.cancel_asked_at, exchange.base_url)
