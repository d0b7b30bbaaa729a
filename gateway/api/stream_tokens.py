"""POST /v1/streams/{id}/token: a URL that reads this stream without a key, for a while."""

import time
from typing import Annotated

from msgspec import Meta, Struct

from gateway import sse
from gateway.api.reading import read
from gateway.api.streams import public_id_for
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api.bodies import decode_body


class TokenBody(Struct, forbid_unknown_fields=True):
    """`expires_in`: seconds. A reading that has begun goes on beyond it."""

    expires_in: Annotated[int, Meta(ge=1, le=3_600)] = 300


async def create_token(serving: Serving, exchange: Exchange) -> None:
    """The body may be empty."""

    def parse(data: bytes) -> TokenBody:
        return decode_body(data, TokenBody) if data else TokenBody()

    tenant, body = await read(serving, exchange, parse)
    public_id_for(serving, exchange, tenant)
    stream: str = exchange.scope["path_params"]["id"]
    expires_at = int(time.time()) + body.expires_in
    token = serving.stream_tokens.issue(tenant.name, stream, expires_at)
    answer = {
        "object": "stream.token",
        "token": token,
        "expires_at": expires_at,
        "url": f"/v1/streams/{stream}?token={token}",
    }
    await exchange.respond(200, sse.to_json(answer))
