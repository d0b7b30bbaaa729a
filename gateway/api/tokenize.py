"""POST /tokenize and /detokenize."""

from gateway import sse
from gateway.api.reading import read
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api import tokenize as forms
from schemas.api.bodies import decode_body


async def tokenize(serving: Serving, exchange: Exchange) -> None:
    def parse(data: bytes) -> bytes:
        return sse.to_json(forms.tokenize(decode_body(data, forms.TokenizeBody), serving.models))

    _, answer = await read(serving, exchange, parse)
    await exchange.respond(200, answer)


async def detokenize(serving: Serving, exchange: Exchange) -> None:
    def parse(data: bytes) -> bytes:
        return sse.to_json(forms.detokenize(decode_body(data, forms.DetokenizeBody), serving.models))

    _, answer = await read(serving, exchange, parse)
    await exchange.respond(200, answer)
