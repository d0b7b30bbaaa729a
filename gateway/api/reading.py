"""What every endpoint with a body does first: who calls, what is asked, and whether it can be."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gateway.exchange import Exchange
from gateway.idempotency import keyed_body
from gateway.serving import Serving
from schemas.api.errors import ApiError
from schemas.records import Tenant

T = TypeVar("T")


async def read(serving: Serving, exchange: Exchange, parse: Callable[[bytes], T]) -> tuple[Tenant, T]:
    """The tenant, and what `parse` makes of the body; for long bodies in a thread: it may tokenize.

    The body is taken for JSON whatever its Content-Type says: curl's own says form data.

    Raises what `parse` raises, ApiError for a refusal, ClientGoneError.
    """
    config = serving.config
    serving.check_open()  # first: before the tenants are read no key is known
    tenant = await serving.authenticate(exchange.headers)
    encoding = exchange.headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        message = (
            f"Content-Encoding: {encoding[:40].decode('latin-1')!r} is not taken; send the JSON as it is"
        )
        raise ApiError(415, "unsupported_encoding", message, "Content-Encoding")
    with serving.bodies.one() as take:
        body = await exchange.read_body(config.max_body_bytes, config.body_timeout_s, take)
        if len(body) <= config.inline_body_bytes:
            parsed = parse(body)
        else:
            loop = asyncio.get_running_loop()
            parsed = await loop.run_in_executor(serving.tokenizing, parse, body)
        exchange.keyed = keyed_body(exchange.headers, exchange.scope["path"], body)
    return tenant, parsed
