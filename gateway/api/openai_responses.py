"""POST /v1/responses, as OpenAI's API has it.

What is stored is a `Described` beside the stream in the log, so any gateway makes the same answer from it
(kept_responses.py), for as long as the log is kept. A background request is one with time to detach until
its end.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from aiokafka.errors import KafkaError

from gateway import sse
from gateway.api.logprobs import told_logprobs
from gateway.api.online import (
    detach_for,
    identify,
    may_be_told,
    new_reader,
    new_request,
    send,
    told_of_serving,
    traceparent,
)
from gateway.api.reading import read
from gateway.ends import DISCONNECTED
from gateway.errors import not_queued
from gateway.event_stream import watch, write_events
from gateway.exchange import ClientGoneError, Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader, StreamReader, WholeReader
from gateway.serving import Serving
from gateway.sse_responses import ResponseFrames
from schemas.api.answers import output_text
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared
from schemas.api.response_object import PREFIX, created_response, ended_response
from schemas.api.responses import ResponsesBody, prepare_response
from schemas.api.told_tokens import ToldTokens
from schemas.records import Described
from schemas.tokenization import Tokenizer

log = logging.getLogger(__name__)


async def create(serving: Serving, exchange: Exchange) -> None:
    """Answers whole, streaming, or in the background at once.

    Raises ApiError for a refusal, ClientGoneError.
    """

    def parse(data: bytes) -> tuple[ResponsesBody, Prepared]:
        body = decode_body(data, ResponsesBody)
        return body, prepare_response(body, serving.models)

    tenant, (body, prepared) = await read(serving, exchange, parse)
    serving.expect_broker()
    request = new_request(serving, exchange, tenant, prepared)
    background = bool(body.background)
    detach = request.end_ms if background else detach_for(serving, exchange)
    tokenizer = prepared.model.tokenizer
    reader = new_reader(serving, exchange, prepared, request)
    reader.heard = not may_be_told(serving, tenant, request)
    if prepared.sampling.logprobs is not None:
        reader.told = ToldTokens(tokenizer)
    owned = serving.owner.accept(request, reader, traceparent(exchange))
    owned.detach_ms = detach
    identify(serving, exchange, owned, described=body.stored)
    exchange.streams = lambda: owned.stream_id
    exchange.late_headers = lambda: told_of_serving(exchange, owned)
    created = created_response(body, f"{PREFIX}{owned.stream_id}", owned.answer_at_s)
    if background and not prepared.stream:
        await _begin(serving, owned, reader, created)
        await exchange.respond(200, sse.to_json(_as_first(created, owned)))
        return
    serving.accepted(owned, reader)
    gone = asyncio.create_task(watch(exchange, reader))
    reason = DISCONNECTED
    try:
        await _send(serving, owned, reader, created)
        if isinstance(reader, StreamReader):
            # In the background the id is what counts: it is told without waiting for a worker.
            reader.keep_alive_due = background and exchange.keyed is None
            await write_events(
                exchange,
                reader,
                lambda: ResponseFrames(
                    _as_first(created, owned),
                    owned.answer_id,
                    tokenizer,
                    reader,
                    partial(told_logprobs, reader, tokenizer),
                    lambda: owned.state.ended,
                ),
            )
        else:
            assert isinstance(reader, WholeReader)
            await _whole(exchange, reader, tokenizer, owned, created)
    except ApiError as e:
        reason = e.code
        raise
    finally:
        gone.cancel()
        serving.finished(owned, reader, reason, exchange.elapsed_s)


async def _begin(serving: Serving, owned: OwnedRequest, reader: Reader, created: dict[str, Any]) -> None:
    """Has the request run with nobody waiting. Raises ApiError for a refusal."""
    try:
        await _send(serving, owned, reader, created)
        if owned.request.idempotency is not None:
            await _know_who_is_first(owned, reader, serving.config.start_wait_s)
    except ApiError as e:
        serving.outbox.put(serving.owner.abandon(owned, e.code))
        raise
    if owned.joined is not None:
        serving.leave_join(owned)
        return
    serving.outbox.put(serving.owner.leave(owned, DISCONNECTED))
    request = owned.request
    log.info(
        "a response runs in the background",
        extra={"request_id": request.request_id.hex(), "tenant": request.tenant, "model": request.model},
    )


async def _know_who_is_first(owned: OwnedRequest, reader: Reader, timeout_s: float) -> None:
    """Its client goes away with an id, which has to be that of the request that runs. Raises ApiError.

    Admission tells a request at once that it is not the first; one that has to wait is.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not (reader.bound or reader.end or owned.joined or reader.disconnected):
                await reader.wait()
    if isinstance(reader.end, ApiError):
        raise reader.end


async def _send(serving: Serving, owned: OwnedRequest, reader: Reader, created: dict[str, Any]) -> None:
    """Returns when the broker has the request, and what is stored of it: who has an answer can read it
    again. Raises ApiError for a refusal."""
    if not created["store"]:
        await send(serving, owned)
    elif owned.request.idempotency is None:
        await asyncio.gather(send(serving, owned), _describe(serving, owned, created))
    else:
        # Of one that is not the first with its key nothing is kept: the first one's answer is read.
        await send(serving, owned)
        await _know_who_is_first(owned, reader, serving.config.start_wait_s)
        if owned.joined is None:
            await _describe(serving, owned, created)


def _as_first(created: dict[str, Any], owned: OwnedRequest) -> dict[str, Any]:
    """Another request may have been first with its Idempotency-Key: the response is that one's."""
    if owned.joined is None:
        return created
    return {**created, "id": f"{PREFIX}{owned.stream_id}", "created_at": owned.answer_at_s}


async def _describe(serving: Serving, owned: OwnedRequest, created: dict[str, Any]) -> None:
    request = owned.request
    owned.description = sse.to_json(created).decode()
    record = Described(request.request_id, owned.description)
    try:
        await serving.outbox.send_description(record, request.reply_partition, serving.config.ack_timeout_s)
    except (TimeoutError, KafkaError) as e:
        log.warning("a response was not stored", extra={"request_id": request.request_id, "error": repr(e)})
        raise not_queued(e, "instructions", "the response that is stored") from None


async def _whole(
    exchange: Exchange,
    reader: WholeReader,
    tokenizer: Tokenizer,
    owned: OwnedRequest,
    created: dict[str, Any],
) -> None:
    while reader.end is None:
        if reader.disconnected:
            raise ClientGoneError
        await reader.wait()
    end = reader.end
    if isinstance(end, ApiError):
        raise end
    await Reader.all_heard([reader])
    text = output_text(tokenizer, reader.token_ids, end.finish_reason, end.text_length)
    logprobs = told_logprobs(reader, tokenizer, None)
    first = _as_first(created, owned)
    response = ended_response(first, owned.answer_id, reader.model, end, text, logprobs)
    await exchange.respond(200, sse.to_json(response))
