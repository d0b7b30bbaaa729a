"""What /v1/generate and /v1/chat/completions have in common: from a body to an owned request to an answer."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka.errors import KafkaError

from gateway import sse
from gateway.api.reading import read
from gateway.exchange import ClientGoneError, Exchange
from gateway.owned_request import OwnedRequest
from gateway.owner import reply_partition
from gateway.reader import Reader, StreamReader, WholeReader
from gateway.serving import Serving
from schemas.api.answers import Finished, answer, output_text
from schemas.api.bodies import ChatCompletionBody, GenerateBody, decode_body
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared, prepare
from schemas.headers import TRACEPARENT
from schemas.priority import PriorityClass
from schemas.records import Completion, InferenceRequest, Tenant

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STREAM_HEADER = b"x-headrace-stream"
MakeFrames = Callable[[OwnedRequest, Reader, Prepared], sse.Frames]


async def serve(
    serving: Serving,
    exchange: Exchange,
    kind: type[GenerateBody] | type[ChatCompletionBody],
    make_frames: MakeFrames,
) -> None:
    """Answers one request, streaming or whole. Raises ApiError for a refusal, ClientGoneError."""

    def parse(data: bytes) -> Prepared:
        return prepare(decode_body(data, kind), serving.models)

    tenant, prepared = await read(serving, exchange, parse)
    request = _request(serving, exchange, tenant, prepared)
    reader = _reader(serving, exchange, prepared, request)
    traceparent = exchange.headers.get(TRACEPARENT.encode(), b"")
    trace = traceparent.decode() if _TRACEPARENT.fullmatch(traceparent) else None
    exchange.extra_headers.append((STREAM_HEADER, serving.public_id(request).encode()))
    owned = serving.owner.accept(request, reader, trace)
    serving.accepted(owned, reader)
    gone = asyncio.create_task(_watch(exchange, reader))
    reason = "disconnected"
    try:
        await _send(serving, owned)
        if isinstance(reader, StreamReader):
            await _stream(exchange, reader, lambda: make_frames(owned, reader, prepared))
        else:
            assert isinstance(reader, WholeReader)
            await _whole(exchange, reader, prepared, request)
    except ApiError as e:
        reason = e.code
        raise
    finally:
        gone.cancel()
        serving.finished(owned, reader, reason, exchange.elapsed_s)


def _request(serving: Serving, exchange: Exchange, tenant: Tenant, prepared: Prepared) -> InferenceRequest:
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


def _reader(serving: Serving, exchange: Exchange, prepared: Prepared, request: InferenceRequest) -> Reader:
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


async def _watch(exchange: Exchange, reader: Reader) -> None:
    await exchange.disconnected()
    reader.on_disconnect()


async def _send(serving: Serving, owned: OwnedRequest) -> None:
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
    )
    await exchange.respond(200, sse.to_json(answer(prepared.url, finished)))


async def _stream(exchange: Exchange, reader: StreamReader, make_frames: Callable[[], sse.Frames]) -> None:
    # 1. Nothing is said before a run is bound, so that a refusal is a real status.
    while not (reader.bound or reader.keep_alive_due):
        if reader.disconnected:
            raise ClientGoneError
        if isinstance(reader.end, ApiError):
            raise reader.end
        if reader.end is not None:
            break
        await reader.wait()
    task = asyncio.current_task()
    assert task is not None
    reader.on_stuck = task.cancel
    try:
        await exchange.start(200, sse.HEADERS)
        await _events(exchange.send, reader, make_frames)
    except asyncio.CancelledError:
        # 3. The client has read nothing for too long; whoever else cancels means it.
        if not reader.stuck:
            raise
        task.uncancel()
        raise ClientGoneError from None


async def _events(
    send: Callable[[dict[str, Any]], Awaitable[None]],
    reader: StreamReader,
    make_frames: Callable[[], sse.Frames],
) -> None:
    # 2. From here on an error is an event, and the stream ends without its normal end.
    frames = make_frames()
    message: dict[str, Any] = {"type": "http.response.body", "body": frames.first(), "more_body": True}
    if message["body"]:
        await send(message)
    text_frame, take = frames.text, reader.take
    while not reader.disconnected:
        taken = take()
        if taken is not None:
            message["body"] = text_frame(*taken)
            await send(message)
        elif reader.end is not None:
            end = reader.end
            last = frames.done(end) if isinstance(end, Completion) else frames.error(end)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        elif reader.keep_alive_due:
            reader.keep_alive_due = False
            message["body"] = sse.KEEP_ALIVE
            await send(message)
        else:
            await reader.wait()
    raise ClientGoneError
