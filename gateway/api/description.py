"""GET /openapi.json."""

from gateway.exchange import Exchange
from gateway.openapi import openapi_json
from gateway.serving import Serving


async def openapi(serving: Serving, exchange: Exchange) -> None:
    await exchange.respond(200, openapi_json())
