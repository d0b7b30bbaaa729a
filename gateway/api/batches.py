"""/v1/batches: batches of a file's lines, in OpenAI's shape and in the own (schemas/api/batches.py)."""

from typing import Any

from gateway import sse
from gateway.api.asking import asked
from gateway.api.pages import openai_page
from gateway.api.reading import read
from gateway.batch_book import Batch
from gateway.batch_log import BatchLog
from gateway.exchange import Exchange
from gateway.idempotency import refuse_key
from gateway.serving import Serving
from schemas.api.batches import (
    HEADRACE,
    OPENAI,
    PURPOSE,
    BatchBody,
    batch_object,
    created_object,
    job_of,
)
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError, bad_field
from schemas.api.tenant_rules import check_model
from schemas.clock import epoch_ms
from schemas.records import BatchCancel, BatchJob, Tenant
from schemas.stored_files import BATCH_PREFIX, is_id, new_batch_id

_PAGE, _MAX_PAGE = 20, 100
_FORMS = frozenset({OPENAI, HEADRACE})


async def create(serving: Serving, exchange: Exchange) -> None:
    refuse_key(exchange.headers)
    tenant, body = await read(serving, exchange, lambda data: decode_body(data, BatchBody))
    now_ms = epoch_ms()
    job = job_of(body, new_batch_id(now_ms), tenant.name, now_ms)
    if job.model is not None:
        if job.model not in serving.models:
            raise ApiError(404, "model_not_found", f"model {job.model[:80]!r} does not exist", "model")
        check_model(tenant, job.model)
    file = await serving.files.find(tenant.name, job.input_file_id, now_ms)
    if file is None:
        message = f"input_file_id: there is no file {job.input_file_id[:80]!r}"
        raise ApiError(404, "file_not_found", message, "input_file_id")
    if file.purpose != PURPOSE:
        raise bad_field("input_file_id", f"the file's purpose is {file.purpose}, not {PURPOSE}")
    if file.expires_at < now_ms + job.completion_window_ms:
        left = (file.expires_at - now_ms) // 1000
        raise bad_field(
            "input_file_id", f"the file expires in {left} s, which is inside the completion_window"
        )
    await start(serving, job)
    await exchange.respond(200, sse.to_json(created_object(job)))


async def list_batches(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    page = openai_page(exchange, _PAGE, _MAX_PAGE)
    log = await batch_log(serving)
    await asked(log.catch_up(tenant.name))
    batches = [b for b in log.book.newest_first(tenant.name) if b.job.form in _FORMS]
    shown = page.cut(batches, [b.job.batch_id for b in batches])
    await exchange.respond(200, sse.to_json(shown.openai([_object(b) for b in shown.items])))


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    await exchange.respond(200, sse.to_json(_object(await _batch(serving, exchange, tenant))))


async def cancel(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    batch = await _batch(serving, exchange, tenant)
    await ask_for_cancel(serving, batch)
    await exchange.respond(200, sse.to_json(_object(batch)))


async def start(serving: Serving, job: BatchJob) -> None:
    log = await batch_log(serving)
    await asked(log.create(job))


async def ask_for_cancel(serving: Serving, batch: Batch) -> None:
    """Once; where it was asked for already nothing is done. Raises ApiError 409 for one that has ended."""
    job = batch.job
    if batch.ended and (batch.state is None or batch.state.status != "cancelled"):
        status = "ended" if batch.state is None else batch.state.status
        raise ApiError(409, "batch_ended", f"the batch is {status}: it cannot be cancelled")
    if batch.cancel_asked_at is None and not batch.ended:
        log = await batch_log(serving)
        await asked(log.cancel(BatchCancel(job.batch_id, job.tenant, epoch_ms())))


async def find(serving: Serving, tenant: Tenant, batch_id: str, forms: frozenset[str]) -> Batch:
    """Raises ApiError 404, also for a batch in another API's form."""
    if is_id(batch_id, BATCH_PREFIX):
        log = await batch_log(serving)
        batch = await asked(log.get(tenant.name, batch_id))
        if batch is not None and batch.job.form in forms:
            return batch
    raise ApiError(404, "batch_not_found", f"there is no batch {batch_id[:80]!r}")


async def batch_log(serving: Serving) -> BatchLog:
    return await asked(serving.stores.batches())


async def _batch(serving: Serving, exchange: Exchange, tenant: Tenant) -> Batch:
    return await find(serving, tenant, exchange.scope["path_params"]["id"], _FORMS)


def _object(batch: Batch) -> dict[str, Any]:
    return batch_object(batch.job, batch.state, batch.cancel_asked_at)
