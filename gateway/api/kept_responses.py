"""/v1/responses/{id}: a response read again at any gateway, while it runs and while the log is kept."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from gateway import sse
from gateway.api.logprobs import told_logprobs
from gateway.api.streams import ask_for_end, model_of
from gateway.attendance import detach_ms
from gateway.ends import code_of
from gateway.event_stream import watch, write_events
from gateway.exchange import ClientGoneError, Exchange
from gateway.public_id import NotAnIdError, PublicId
from gateway.response_replay import ResponseReader, ResponseReplay
from gateway.serving import Serving
from gateway.sse_responses import NOTHING_SENT, ResponseFrames, position_behind
from schemas.api.answers import output_text
from schemas.api.errors import ApiError, bad_field
from schemas.api.response_object import PREFIX, ended_response, failed_response, running_response
from schemas.api.responses import LOGPROBS
from schemas.clock import epoch_ms
from schemas.models import LoadedModel
from schemas.records import Completion, Tenant

log = logging.getLogger(__name__)

_READ_S = 30.0
# A cancel is through in an engine step; who waits longer is told what is so by then.
_CANCEL_S = 2.0
_NUMBER = re.compile(r"[0-9]{1,18}")
_BOOLS = {"true": True, "false": False}


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    """The response as it is now; with `stream=true` its events, behind `starting_after` if that is given."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    public_id = _kept(serving, exchange, tenant)
    stream, starting_after = _asked(exchange)
    model = model_of(serving, public_id)
    if stream:
        await _stream(serving, exchange, tenant, public_id, model, starting_after)
        return
    with _following(serving, exchange, tenant, public_id, model) as replay:
        await _until(replay, _READ_S, lambda: replay.caught_up and replay.created is not None)
        response = _response(replay, model)
    await exchange.respond(200, sse.to_json(response))


async def cancel(serving: Serving, exchange: Exchange) -> None:
    """Asks for the end and answers with the response, which has ended unless that takes long."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    public_id = _kept(serving, exchange, tenant)
    model = model_of(serving, public_id)
    with _following(serving, exchange, tenant, public_id, model) as replay:
        await _until(replay, _READ_S, lambda: replay.caught_up and replay.created is not None)
        if replay.end_by(epoch_ms()) is None:
            ask_for_end(serving, tenant, public_id)
            await _until(replay, _CANCEL_S, lambda: False)
        response = _response(replay, model)
    await exchange.respond(200, sse.to_json(response))


async def delete(serving: Serving, exchange: Exchange) -> None:
    """Refused: the log cannot forget one request, and to say that it did would not be true."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    _kept(serving, exchange, tenant)
    exchange.extra_headers.append((b"allow", b"GET"))
    message = (
        "a response cannot be deleted: the log keeps it for its retention time and no longer; "
        "POST /v1/responses/{id}/cancel ends it"
    )
    raise ApiError(405, "method_not_allowed", message)


async def input_items(serving: Serving, exchange: Exchange) -> None:
    """Refused: of the input there are only token ids."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    _kept(serving, exchange, tenant)
    raise ApiError(404, "not_found", "the input of a response is not kept")


async def _stream(
    serving: Serving,
    exchange: Exchange,
    tenant: Tenant,
    public_id: PublicId,
    model: LoadedModel,
    starting_after: int,
) -> None:
    partition = public_id.reply_partition
    detach = detach_ms(exchange.headers, serving.config.max_detach_s)
    with _following(serving, exchange, tenant, public_id, model, position_behind(starting_after)) as replay:
        reader = replay.response_reader
        serving.attach(public_id.request_id, partition)
        try:
            await _until(replay, _READ_S, lambda: replay.created is not None)
            created = _created(replay)
            reader.keep_alive_due = True  # whether it is queued still is said by the events
            if created["background"]:
                detach = serving.config.end_ms
            await write_events(
                exchange,
                reader,
                lambda: ResponseFrames(
                    created,
                    public_id.request_id,
                    model.tokenizer,
                    reader,
                    partial(told_logprobs, reader, model.tokenizer),
                    lambda: replay.state.ended,
                    starting_after,
                ),
            )
        finally:
            serving.detach(public_id.request_id, partition, detach)
            log.info(
                "a response was read from the log",
                extra={
                    "request_id": public_id.request_id.hex(),
                    "tenant": tenant.name,
                    "end": code_of(reader.end),
                    "ms": round(exchange.elapsed_s * 1000, 1),
                },
            )


@contextmanager
def _following(
    serving: Serving,
    exchange: Exchange,
    tenant: Tenant,
    public_id: PublicId,
    model: LoadedModel,
    after: int = -1,
) -> Iterator[ResponseReplay]:
    """A replay that is fed from the log while the client is there. Raises ApiError 503 where too many are."""
    reader = ResponseReader(serving.config, model, after, time.monotonic())
    replay = ResponseReplay(public_id.request_id, tenant.name, reader)
    serving.scans.follow(public_id.reply_partition, public_id.first_offset, replay)
    gone = asyncio.create_task(watch(exchange, reader))
    try:
        yield replay
    finally:
        gone.cancel()
        serving.scans.leave(replay)


async def _until(replay: ResponseReplay, timeout_s: float, enough: Callable[[], bool]) -> None:
    """Returns when that is so, at the end of the stream, or when the time is up. Raises ClientGoneError."""
    reader = replay.reader
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not (enough() or reader.end is not None or reader.disconnected):
                await reader.wait()
    if reader.disconnected:
        raise ClientGoneError


def _created(replay: ResponseReplay) -> dict[str, Any]:
    """Raises ApiError for what kept it from being read."""
    if replay.created is not None:
        return replay.created
    end = replay.reader.end
    if isinstance(end, ApiError) and not replay.state.ended:
        raise end
    if end is None and not replay.caught_up:
        raise _late()
    raise _not_found()


def _response(replay: ResponseReplay, model: LoadedModel) -> dict[str, Any]:
    """What is so now. Raises ApiError where the log does not say it."""
    created, reader, request_id = _created(replay), replay.response_reader, replay.request_id
    tokenizer, end = model.tokenizer, replay.end_by(epoch_ms())
    if isinstance(end, Completion):
        text = output_text(tokenizer, reader.token_ids, end.finish_reason, end.text_length)
        logprobs = told_logprobs(reader, tokenizer, None)
        return ended_response(created, request_id, reader.model, end, text, logprobs)
    text = tokenizer.detokenizer().push(reader.shown_ids)
    if end is None:
        if not replay.caught_up:
            raise _late()
        begun = replay.state.run is not None or bool(replay.state.token_ids)
        return running_response(created, request_id, reader.model, begun, text)
    if not replay.state.ended:
        raise end
    return failed_response(created, request_id, reader.model, end, text)


def _kept(serving: Serving, exchange: Exchange, tenant: Tenant) -> PublicId:
    """The response in the path. Raises ApiError 404 for one that is not the tenant's or was not stored."""
    text: str = exchange.scope["path_params"]["id"]
    try:
        public_id = serving.public_ids.decode(tenant.name, text.removeprefix(PREFIX))
    except NotAnIdError:
        raise _not_found() from None
    if not text.startswith(PREFIX) or not public_id.described:
        raise _not_found()
    return public_id


def _late() -> ApiError:
    message = "the log could not be read in time; try again"
    return ApiError(503, "broker_unavailable", message, None, 1_000)


def _not_found() -> ApiError:
    return ApiError(404, "response_not_found", "there is no such response, or it was not stored")


def _asked(exchange: Exchange) -> tuple[bool, int]:
    """`stream` and `starting_after` of the query. Raises ApiError that names what is not served."""
    query = parse_qs(exchange.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
    stream, starting_after = False, NOTHING_SENT
    for name, values in query.items():
        value = values[-1]
        match name:
            case "stream" if value in _BOOLS:
                stream = _BOOLS[value]
            case "include_obfuscation" if value == "false":
                pass
            case "include" | "include[]" if set(values) == {LOGPROBS}:
                pass  # they are told if the request asked for them
            case "starting_after" if _NUMBER.fullmatch(value):
                starting_after = int(value)
            case "stream" | "include_obfuscation" | "include" | "include[]" | "starting_after":
                raise bad_field(name.removesuffix("[]"), f"{value[:40]!r} is not served")
            case _:
                raise ApiError(400, "unknown_field", f"{name[:40]}: this is not supported", name[:40])
    if starting_after != NOTHING_SENT and not stream:
        raise bad_field("starting_after", "goes with stream=true")
    return stream, starting_after
