"""What the APIs that generate have in common: from a body to an owned request to an answer."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiokafka.errors import KafkaError

from gateway import sse
from gateway.api.logprobs import whole_logprobs
from gateway.api.reading import read
from gateway.attendance import detach_ms, start_ms
from gateway.choice_stream import Choice, failure_of, has_failed
from gateway.ends import DISCONNECTED
from gateway.errors import is_anthropic, not_queued
from gateway.event_stream import watch, write_events
from gateway.exchange import ClientGoneError, Exchange
from gateway.idempotency import has_key, key_of
from gateway.owned_request import OwnedRequest
from gateway.owner import reply_partition
from gateway.rate_headers import rate_headers
from gateway.reader import Reader, StreamReader, WholeReader
from gateway.serving import Serving
from schemas.api.answers import Finished, answer, output_text, stop_sequence
from schemas.api.bodies import decode_body
from schemas.api.choices import choice_request_id
from schemas.api.errors import ApiError
from schemas.api.messages import MessagesBody, prepare_messages
from schemas.api.prepare import Body, Prepared, prepare
from schemas.api.routing import affinity_hash
from schemas.api.tenant_rules import sampling_for
from schemas.api.told_tokens import ToldTokens
from schemas.api.tool_calls import parse_tool_calls
from schemas.clock import epoch_ms
from schemas.headers import TRACEPARENT
from schemas.priority import PriorityClass
from schemas.records import Completion, Idempotency, InferenceRequest, Tenant

log = logging.getLogger(__name__)

MAX_TOKENS_HEADER = b"x-headrace-max-tokens"
MODEL_HEADER = b"x-headrace-model"
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_FREED_S = 1.0
MakeFrames = Callable[[OwnedRequest, Reader, Prepared], sse.Frames]


async def serve(
    serving: Serving,
    exchange: Exchange,
    kind: type[Body] | type[MessagesBody],
    make_frames: MakeFrames,
) -> None:
    """Answers one request, streaming or whole. Raises ApiError for a refusal, ClientGoneError."""

    def parse(data: bytes) -> list[Prepared]:
        body = decode_body(data, kind)
        if isinstance(body, MessagesBody):
            return [prepare_messages(body, serving.models)]
        return [prepare(body, serving.models)]

    async def write(choices: Sequence[Choice]) -> None:
        (choice,) = choices
        owned, reader, prepared = choice
        assert isinstance(reader, StreamReader)
        await write_events(exchange, reader, lambda: make_frames(owned, reader, prepared))

    await answer_choices(serving, exchange, parse, write)


async def answer_choices(
    serving: Serving,
    exchange: Exchange,
    parse: Callable[[bytes], list[Prepared]],
    write: Callable[[Sequence[Choice]], Awaitable[None]],
) -> None:
    """Answers a body that asks for one request or several, all or none; `write` a stream's response.

    Raises ApiError for a refusal, ClientGoneError.
    """
    tenant, wanted = await read(serving, exchange, parse)
    serving.expect_broker()
    trace = traceparent(exchange)
    detach = detach_for(serving, exchange)
    requests = [new_request(serving, exchange, tenant, prepared, i) for i, prepared in enumerate(wanted)]
    choices = []
    for i, (request, prepared) in enumerate(zip(requests, wanted, strict=True)):
        reader = new_reader(serving, exchange, prepared, request)
        reader.heard = not may_be_told(serving, tenant, request)
        if prepared.sampling.logprobs is not None:
            reader.told = ToldTokens(prepared.model.tokenizer)
        owned = serving.owner.accept(request, reader, trace)
        owned.detach_ms = detach
        identify(serving, exchange, owned, i, call_prefix=prepared.call_prefix)
        choices.append(Choice(owned, reader, prepared))
        serving.accepted(owned, reader)
    exchange.streams = lambda: ", ".join(choice.owned.stream_id for choice in choices)
    exchange.late_headers = lambda: told_of_serving(exchange, *(choice.owned for choice in choices))
    gone = asyncio.create_task(watch(exchange, *(choice.reader for choice in choices)))
    reason, refused = DISCONNECTED, False
    try:
        await _send_all(serving, choices)
        if wanted[0].stream:
            await write(choices)
            reason = failure_of(choices) or reason
        else:
            await _whole(exchange, choices)
    except ApiError as e:
        reason = e.code
        if len(choices) > 1 and not has_failed(choices):
            # Refused as a whole: those that were let in meanwhile cost nothing.
            refused = True
            for choice in choices:
                serving.outbox.put(serving.owner.waive(choice.owned, e.code, epoch_ms()))
        raise
    finally:
        gone.cancel()
        for choice in choices:
            serving.finished(choice.owned, choice.reader, reason, exchange.elapsed_s)
        if refused and exchange.keyed is not None:
            # It may ask with its key again at once: admission reads first that the key is free.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FREED_S):
                    await serving.outbox.drained()


def may_be_told(serving: Serving, tenant: Tenant, request: InferenceRequest) -> bool:
    """Whether the head of its answer has to wait for what admission says, should tokens overtake that: with
    limits there is something left, shedding may cut it short, or another model may serve it."""
    limited = any(limits.priority == request.priority for limits in tenant.limits)
    other_model = request.allow_fallback and len(serving.models) > 1
    return limited or other_model or request.priority == PriorityClass.FREE


def told_of_serving(exchange: Exchange, *owned: OwnedRequest) -> list[tuple[bytes, bytes]]:
    """The headers that tell what the tenant of all `owned` has left, which models serve them, and how long
    their answers may be if shedding cut them short."""
    told = [limit for each in owned for limit in each.rate_limits]
    headers = rate_headers(told, anthropic=is_anthropic(exchange), now_s=time.time())
    if models := sorted({each.state.model for each in owned if each.state.model}):
        headers.append((MODEL_HEADER, ", ".join(models).encode()))
    capped = [each.state.max_tokens for each in owned if each.state.max_tokens is not None]
    return [*headers, (MAX_TOKENS_HEADER, b"%d" % min(capped))] if capped else headers


async def _send_all(serving: Serving, choices: Sequence[Choice]) -> None:
    if len(choices) == 1:
        await send(serving, choices[0].owned)
        return
    results = await asyncio.gather(*(send(serving, c.owned) for c in choices), return_exceptions=True)
    for result in results:
        if result is not None:
            raise result


def traceparent(exchange: Exchange) -> str | None:
    """The client's trace context (W3C), None where it sent none that can be used."""
    value = exchange.headers.get(TRACEPARENT.encode(), b"")
    return value.decode() if _TRACEPARENT.fullmatch(value) else None


def new_request(
    serving: Serving, exchange: Exchange, tenant: Tenant, prepared: Prepared, index: int = 0
) -> InferenceRequest:
    """The first attempt of the choice `index`.

    Raises ApiError for what the tenant may not ask for, 400 for a bad X-Headrace-Start.
    """
    priority = PriorityClass(tenant.tier) if prepared.priority is None else prepared.priority
    if priority < tenant.tier:
        allowed = PriorityClass(tenant.tier).label
        raise ApiError(
            403,
            "class_not_allowed",
            f"priority: this tenant may ask for {allowed} or below, not {priority.label}",
            "priority",
        )
    sampling = sampling_for(tenant, priority, prepared)
    return InferenceRequest(
        request_id=choice_request_id(exchange.request_id, index),
        attempt=1,
        tenant=tenant.name,
        priority=priority,
        model=prepared.model.spec.id,
        # A list of its own: it is emptied at the end, and choices share a prompt.
        prompt_token_ids=prepared.prompt_token_ids.copy(),
        output_token_ids=[],
        sampling=sampling,
        reply_partition=reply_partition(serving.owner.slot, priority),
        owner_epoch=serving.owner.epoch,
        accepted_at=epoch_ms(),
        end_ms=serving.config.end_ms,
        affinity=affinity_hash(tenant.name, prepared.routing.affinity_key),
        allow_fallback=prepared.routing.allow_fallback,
        start_ms=start_ms(exchange.headers),
    )


def detach_for(serving: Serving, exchange: Exchange) -> int:
    """How long the request goes on unread (ms). Raises ApiError 400."""
    config = serving.config
    unnamed_s = config.keyed_detach_s if has_key(exchange.headers) else 0.0
    return detach_ms(exchange.headers, config.max_detach_s, unnamed_s)


def identify(
    serving: Serving,
    exchange: Exchange,
    owned: OwnedRequest,
    index: int = 0,
    *,
    described: bool = False,
    call_prefix: str = "",
) -> None:
    """Where the stream of the choice is read, and what its Idempotency-Key says; before it is sent."""
    request, keyed = owned.request, exchange.keyed
    owned.stream_id = serving.public_id(request, described, call_prefix)
    owned.described = described
    if keyed is not None:
        key = key_of(request.tenant, keyed.key, index)
        request.idempotency = Idempotency(key, keyed.body, owned.stream_id)


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
        start_wait_s=config.start_wait_s,
        keep_alive_s=config.keep_alive_s,
        write_timeout_s=config.write_timeout_s,
    )


async def send(serving: Serving, owned: OwnedRequest) -> None:
    """Returns when the broker has the request. Raises ApiError 503, or 413 where its topic takes none so
    large."""
    try:
        offset = await serving.outbox.send_request(owned, serving.config.ack_timeout_s)
    except (TimeoutError, KafkaError) as e:
        log.warning(
            "a request was not acked", extra={"request_id": owned.request.request_id, "error": repr(e)}
        )
        raise not_queued(e, "prompt", "the request") from None
    serving.owner.on_sent(owned, offset)


async def _whole(exchange: Exchange, choices: Sequence[Choice]) -> None:
    readers = [choice.reader for choice in choices]
    while True:
        for reader in readers:
            if isinstance(reader.end, ApiError):
                raise reader.end
        if all(reader.end is not None for reader in readers):
            break
        if readers[0].disconnected:
            raise ClientGoneError
        await Reader.wait_any(readers)
    await Reader.all_heard(readers)
    said = answer(choices[0].prepared.url, *(_finished(choice) for choice in choices))
    await exchange.respond(200, sse.to_json(said))


def _finished(choice: Choice) -> Finished:
    owned, reader, prepared = choice
    end = reader.end
    assert isinstance(reader, WholeReader)
    assert isinstance(end, Completion)
    text = output_text(prepared.model.tokenizer, reader.token_ids, end.finish_reason, end.text_length)
    text, tool_calls = parse_tool_calls(text) if prepared.has_tools else (text, [])
    return Finished(
        request_id=owned.answer_id,
        model=reader.model,
        created_s=owned.answer_at_s,
        text=text,
        finish_reason=end.finish_reason,
        input_tokens=end.input_tokens,
        cached_tokens=end.cached_tokens,
        output_tokens=end.output_tokens,
        logprobs=whole_logprobs(reader, prepared, end),
        service_tier=prepared.service_tier,
        tool_calls=tool_calls,
        stop_sequence=None if end.text_length is None else _stop_sequence(reader, prepared, end.text_length),
    )


def _stop_sequence(reader: WholeReader, prepared: Prepared, text_length: int) -> str | None:
    text = prepared.model.tokenizer.detokenizer().push(reader.token_ids)
    return stop_sequence(text[text_length:], prepared.sampling.stop)
