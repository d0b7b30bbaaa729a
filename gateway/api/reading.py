"""What every endpoint with a body does first: who calls, what is asked, and whether it can be."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gateway import sse
from gateway.exchange import Exchange
from gateway.idempotency import keyed_body
from gateway.serving import Serving
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.messages import CountTokensBody
from schemas.api.tenant_rules import check_model
from schemas.api.tokenize import DetokenizeBody, TokenizeBody
from schemas.models import LoadedModel
from schemas.records import Tenant

T = TypeVar("T")
B = TypeVar("B", TokenizeBody, DetokenizeBody, CountTokensBody)


async def read(serving: Serving, exchange: Exchange, parse: Callable[[bytes], T]) -> tuple[Tenant, T]:
    """The tenant, and what `parse` makes of the body; for long bodies in a thread: it may tokenize.

    The body is taken for JSON whatever its Content-Type says: curl's own says form data.

    Raises what `parse` raises, ApiError for a refusal, ClientGoneError.
    """
    config = serving.config
    serving.check_open()  # first: before the tenants are read no key is known
    tenant = await serving.authenticate(exchange.headers)
    check_encoding(exchange)
    with serving.bodies.one() as take:
        body = await exchange.read_body(config.max_body_bytes, config.body_timeout_s, take)
        if len(body) <= config.inline_body_bytes:
            parsed = parse(body)
        else:
            loop = asyncio.get_running_loop()
            parsed = await loop.run_in_executor(serving.tokenizing, parse, body)
        exchange.keyed = keyed_body(exchange.headers, exchange.scope["path"], body)
    return tenant, parsed


async def answer_by_model(
    serving: Serving,
    exchange: Exchange,
    kind: type[B],
    answer: Callable[[B, Mapping[str, LoadedModel]], Mapping[str, Any]],
) -> None:
    """Answers what the gateway knows by itself about a model that the tenant may ask for.

    Raises what `answer` raises, ApiError for a refusal, ClientGoneError.
    """

    def parse(data: bytes) -> tuple[str, bytes]:
        body = decode_body(data, kind)
        return body.model, sse.to_json(answer(body, serving.models))

    tenant, (model, said) = await read(serving, exchange, parse)
    check_model(tenant, model)
    await exchange.respond(200, said)


def check_encoding(exchange: Exchange) -> None:
    """Raises ApiError 415 for a body that is compressed."""
    encoding = exchange.headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        message = (
            f"Content-Encoding: {encoding[:40].decode('latin-1')!r} is not taken; send the body as it is"
        )
        raise ApiError(415, "unsupported_encoding", message, "Content-Encoding")
