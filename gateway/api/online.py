"""What the APIs that generate have in common: from a body to an owned request to an answer."""

import asyncio
import logging
import re
import time
from collections.abc import Callable

from aiokafka.errors import KafkaError

from gateway import sse
from gateway.api.logprobs import whole_logprobs
from gateway.api.reading import read
from gateway.attendance import detach_ms
from gateway.ends import DISCONNECTED
from gateway.event_stream import watch, write_events
from gateway.exchange import ClientGoneError, Exchange
from gateway.owned_request import OwnedRequest
from gateway.owner import reply_partition
from gateway.reader import Reader, StreamReader, WholeReader
from gateway.serving import Serving
from gateway.told_tokens import ToldTokens
from schemas.api.answers import Finished, answer, output_text, stop_sequence
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.messages import MessagesBody, prepare_messages
from schemas.api.prepare import Body, Prepared, prepare
from schemas.headers import TRACEPARENT
from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, Tenant

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STREAM_HEADER = b"x-headrace-stream"
MakeFrames = Callable[[OwnedRequest, Reader, Prepared], sse.Frames]


async def serve(
    serving: Serving,
    exchange: Exchange,
    kind: type[Body] | type[MessagesBody],
    make_frames: MakeFrames,
) -> None:
    """Answers one request, streaming or whole. Raises ApiError for a refusal, ClientGoneError."""

    def parse(data: bytes) -> Prepared:
        body = decode_body(data, kind)
        if isinstance(body, MessagesBody):
            return prepare_messages(body, serving.models)
        return prepare(body, serving.models)

    tenant, prepared = await read(serving, exchange, parse)
    request = new_request(serving, exchange, tenant, prepared)
    reader = new_reader(serving, exchange, prepared, request)
    if prepared.sampling.logprobs is not None:
        reader.told = ToldTokens(prepared.model.tokenizer)
    detach = detach_ms(exchange.headers, serving.config.max_detach_s)
    exchange.extra_headers.append((STREAM_HEADER, serving.public_id(request).encode()))
    owned = serving.owner.accept(request, reader, traceparent(exchange))
    owned.detach_ms = detach
    serving.accepted(owned, reader)
    gone = asyncio.create_task(watch(exchange, reader))
    reason = DISCONNECTED
    try:
        await send(serving, owned)
        if isinstance(reader, StreamReader):
            await write_events(exchange, reader, lambda: make_frames(owned, reader, prepared))
        else:
            assert isinstance(reader, WholeReader)
            await _whole(exchange, reader, prepared, request)
    except ApiError as e:
        reason = e.code
        raise
    finally:
        gone.cancel()
        serving.finished(owned, reader, reason, exchange.elapsed_s)


def traceparent(exchange: Exchange) -> str | None:
    """The client's trace context (W3C), None where it sent none that can be used."""
    value = exchange.headers.get(TRACEPARENT.encode(), b"")
    return value.decode() if _TRACEPARENT.fullmatch(value) else None


def new_request(serving: Serving, exchange: Exchange, tenant: Tenant, prepared: Prepared) -> InferenceRequest:
    """The first attempt. Raises ApiError 403 for a class above the tenant's tier."""
    priority = PriorityClass(tenant.tier) if prepared.priority is None else prepared.priority
    if priority < tenant.tier:
        allowed = PriorityClass(tenant.tier).label
        raise ApiError(
            403,
            "class_not_allowed",
            f"priority: this tenant may ask for {allowed} or below, not {priority.label}",
            "priority",
        )
    return InferenceRequest(
        request_id=exchange.request_id,
        attempt=1,
        tenant=tenant.name,
        priority=priority,
        model=prepared.model.spec.id,
        prompt_token_ids=prepared.prompt_token_ids,
        output_token_ids=[],
        sampling=prepared.sampling,
        reply_partition=reply_partition(serving.owner.slot, priority),
        owner_epoch=serving.owner.epoch,
        accepted_at=time.time_ns() // 1_000_000,
        end_ms=serving.config.end_ms,
    )


def new_reader(serving: Serving, exchange: Exchange, prepared: Prepared, request: InferenceRequest) -> Reader:
    """Who waits for the answer: a StreamReader, or a WholeReader where the body wants no stream."""
    timing = serving.metrics.timings[PriorityClass(request.priority)]
    if not prepared.stream:
        return WholeReader(request.model, timing, exchange.started_at)
    config = serving.config
    return StreamReader(
        request.model,
        timing,
        exchange.started_at,
        prepared.model.tokenizer.detokenizer(),
        may_be_cut=bool(request.sampling.stop),
        limit_chars=config.stream_buffer_chars,
        start_wait_s=config.start_wait_s,
        keep_alive_s=config.keep_alive_s,
        write_timeout_s=config.write_timeout_s,
    )


async def send(serving: Serving, owned: OwnedRequest) -> None:
    """Returns when the broker has the request. Raises ApiError 503."""
    try:
        offset = await serving.outbox.send_request(owned, serving.config.ack_timeout_s)
    except (TimeoutError, KafkaError) as e:
        log.warning(
            "a request was not acked", extra={"request_id": owned.request.request_id, "error": repr(e)}
        )
        message = "the request could not be queued; try again"
        raise ApiError(503, "broker_unavailable", message, None, 1_000) from None
    serving.owner.on_sent(owned, offset)


async def _whole(
    exchange: Exchange, reader: WholeReader, prepared: Prepared, request: InferenceRequest
) -> None:
    while reader.end is None:
        if reader.disconnected:
            raise ClientGoneError
        await reader.wait()
    end = reader.end
    if isinstance(end, ApiError):
        raise end
    finished = Finished(
        request_id=request.request_id,
        model=reader.model,
        created_s=request.accepted_at // 1000,
        text=output_text(prepared.model.tokenizer, reader.token_ids, end.finish_reason, end.text_length),
        finish_reason=end.finish_reason,
        input_tokens=end.input_tokens,
        cached_tokens=end.cached_tokens,
        output_tokens=end.output_tokens,
        logprobs=whole_logprobs(reader, prepared, end),
        service_tier=prepared.service_tier,
        stop_sequence=None if end.text_length is None else _stop_sequence(reader, prepared, end.text_length),
    )
    await exchange.respond(200, sse.to_json(answer(prepared.url, finished)))


def _stop_sequence(reader: WholeReader, prepared: Prepared, text_length: int) -> str | None:
    text = prepared.model.tokenizer.detokenizer().push(reader.token_ids)
    return stop_sequence(text[text_length:], prepared.sampling.stop)
