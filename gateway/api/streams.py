"""/v1/streams/{id}: a stream that its client comes back to, at any gateway, while it runs and afterwards."""

import asyncio
import re
import time
from urllib.parse import parse_qs

from gateway import sse
from gateway.event_stream import watch, write_events
from gateway.exchange import Exchange
from gateway.public_id import NotAnIdError, PublicId, hash_model
from gateway.replay import Replay, ReplayReader
from gateway.serving import Serving
from schemas.api.errors import ApiError, bad_field
from schemas.models import LoadedModel
from schemas.records import Tenant

_LAST_EVENT_ID = b"last-event-id"
_STARTING_AFTER = "starting_after"
_POSITION = re.compile(r"-1|[0-9]{1,18}")


async def read_stream(serving: Serving, exchange: Exchange) -> None:
    """Server-sent events in the form of /v1/generate, whatever the stream was asked for as."""
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    public_id = _public_id(serving, exchange, tenant)
    reader = ReplayReader(
        serving.config,
        _model(serving, public_id),
        public_id.may_be_cut,
        _after(exchange),
        time.monotonic(),
    )
    replay = Replay(public_id.request_id, tenant.name, reader)
    serving.scans.follow(public_id.reply_partition, public_id.first_offset, replay)
    gone = asyncio.create_task(watch(exchange, reader))
    try:
        await write_events(exchange, reader, sse.GenerateFrames)
    finally:
        gone.cancel()
        serving.scans.leave(replay)


def _public_id(serving: Serving, exchange: Exchange, tenant: Tenant) -> PublicId:
    try:
        return serving.public_ids.decode(tenant.name, exchange.scope["path_params"]["id"])
    except NotAnIdError:
        raise ApiError(404, "stream_not_found", "there is no such stream") from None


def _model(serving: Serving, public_id: PublicId) -> LoadedModel:
    for model_id, model in serving.models.items():
        if hash_model(model_id) == public_id.model_hash:
            return model
    raise ApiError(503, "model_not_served", "this gateway does not serve the model of this stream")


def _after(exchange: Exchange) -> int:
    """The position that the client has read up to, -1 for none.

    The header wins: an EventSource that connects again repeats its first URL.
    """
    header = exchange.headers.get(_LAST_EVENT_ID)
    if header is not None:
        name, text = "Last-Event-ID", header.decode("ascii", "replace")
    else:
        query = parse_qs(exchange.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
        name, text = _STARTING_AFTER, query.get(_STARTING_AFTER, ["-1"])[-1]
    if not _POSITION.fullmatch(text):
        raise bad_field(name, f"an output position is an integer from -1 on, not {text[:40]!r}")
    return int(text)
