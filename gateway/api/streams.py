"""/v1/streams/{id}: a stream that its client comes back to, at any gateway, while it runs and afterwards."""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from urllib.parse import parse_qs

from gateway import sse
from gateway.actions import Announce, Cancel
from gateway.attendance import detach_ms
from gateway.ends import code_of
from gateway.event_stream import watch, write_events
from gateway.exchange import Exchange
from gateway.public_id import NotAnIdError, PublicId, hash_model
from gateway.replay import Replay, ReplayReader
from gateway.serving import Serving
from gateway.sse_tools import ToolGenerateFrames
from gateway.stream_token import NotATokenError
from schemas import topics
from schemas.api.errors import ApiError, bad_field
from schemas.models import LoadedModel
from schemas.records import Cancellation, Tenant

log = logging.getLogger(__name__)

_LAST_EVENT_ID = b"last-event-id"
_STARTING_AFTER = "starting_after"
_TOKEN = "token"
_POSITION = re.compile(r"-1|[0-9]{1,18}")
_ALL_ATTEMPTS = 2**31 - 1


async def read_stream(serving: Serving, exchange: Exchange) -> None:
    """Server-sent events in the form of /v1/generate, whatever the stream was asked for as."""
    serving.check_open()
    query = parse_qs(exchange.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
    if _TOKEN in query:
        tenant = _by_token(serving, exchange, query[_TOKEN][-1])
    else:
        tenant = await serving.authenticate(exchange.headers)
    public_id = public_id_for(serving, exchange, tenant)
    detach = detach_ms(exchange.headers, serving.config.max_detach_s)
    after = _after(exchange, query)
    reader = ReplayReader(
        serving.config,
        model_of(serving, public_id),
        public_id.may_be_cut,
        # Calls are read out of the whole output; what the client has of it is not shown.
        -1 if public_id.call_prefix else after,
        time.monotonic(),
    )
    replay = Replay(public_id.request_id, tenant.name, reader)
    partition = public_id.reply_partition
    serving.scans.follow(partition, public_id.first_offset, replay)
    serving.attach(public_id.request_id, partition)
    gone = asyncio.create_task(watch(exchange, reader))
    try:
        await write_events(exchange, reader, lambda: _frames(public_id, after))
    finally:
        gone.cancel()
        serving.scans.leave(replay)
        serving.detach(public_id.request_id, partition, detach)
        log.info(
            "a stream was read from the log",
            extra={
                "request_id": public_id.request_id.hex(),
                "tenant": tenant.name,
                "end": code_of(reader.end),
                "ms": round(exchange.elapsed_s * 1000, 1),
            },
        )


async def cancel_stream(serving: Serving, exchange: Exchange) -> None:
    """Asks for the end; what was generated so far can still be read. No error if it has ended."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    ask_for_end(serving, tenant, public_id_for(serving, exchange, tenant))
    answer = {"id": exchange.scope["path_params"]["id"], "object": "stream", "status": "cancelling"}
    await exchange.respond(202, sse.to_json(answer))


def ask_for_end(serving: Serving, tenant: Tenant, public_id: PublicId) -> None:
    """Has the request cancelled, whichever gateway owns it; nothing happens if it has ended."""
    request_id = public_id.request_id
    word = Cancellation(request_id, _ALL_ATTEMPTS, tenant.name, "cancelled")
    # 1. The owner, wherever it is, knows that the end was asked for before it sees it: it sends no retry.
    serving.outbox.put([Announce(word, public_id.reply_partition)])
    owned = serving.owner.open.get(request_id)
    if owned is not None:
        serving.outbox.put(serving.owner.cancel(owned, word.reason, told=True))
    else:
        # 2. Whatever becomes of its owner, the work stops.
        shards = serving.config.shards
        partition = topics.tenant_partition(tenant.name, public_id.priority, shards)
        serving.outbox.put([Cancel(word, partition, behind_request=True)])


def public_id_for(serving: Serving, exchange: Exchange, tenant: Tenant) -> PublicId:
    """The stream in the path. Raises ApiError 404 for one that is not the tenant's."""
    try:
        return serving.public_ids.decode(tenant.name, exchange.scope["path_params"]["id"])
    except NotAnIdError:
        raise ApiError(404, "stream_not_found", "there is no such stream") from None


def _frames(public_id: PublicId, after: int) -> sse.Frames:
    if not public_id.call_prefix:
        return sse.GenerateFrames()
    return ToolGenerateFrames(public_id.request_id, public_id.call_prefix, after)


def _by_token(serving: Serving, exchange: Exchange, token: str) -> Tenant:
    # The token alone gives access, no cookie does: pages of any origin may use the URL they were given.
    exchange.extra_headers.append((b"access-control-allow-origin", b"*"))
    try:
        name = serving.stream_tokens.tenant(token, exchange.scope["path_params"]["id"], time.time())
    except NotATokenError:
        message = "the token is not for this stream, or is too old"
        raise ApiError(401, "invalid_stream_token", message, _TOKEN) from None
    return serving.tenants.named(name)


def model_of(serving: Serving, public_id: PublicId) -> LoadedModel:
    """The model whose tokens the stream holds. Raises ApiError 503 where it is not served."""
    for model_id, model in serving.offered.loaded.items():
        if hash_model(model_id) == public_id.model_hash:
            return model
    raise ApiError(503, "model_not_served", "this gateway does not serve the model of this stream")


def _after(exchange: Exchange, query: Mapping[str, list[str]]) -> int:
    """The position that the client has read up to, -1 for none.

    The header wins: an EventSource that connects again repeats its first URL.
    """
    header = exchange.headers.get(_LAST_EVENT_ID)
    if header is not None:
        name, text = "Last-Event-ID", header.decode("ascii", "replace")
    else:
        name, text = _STARTING_AFTER, query.get(_STARTING_AFTER, ["-1"])[-1]
    if not _POSITION.fullmatch(text):
        raise bad_field(name, f"an output position is an integer from -1 on, not {text[:40]!r}")
    return int(text)
