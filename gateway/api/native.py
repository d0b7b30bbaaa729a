"""POST /v1/generate."""

from gateway import sse
from gateway.api.online import serve
from gateway.exchange import Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader
from gateway.serving import Serving
from schemas.api.bodies import GenerateBody
from schemas.api.prepare import Prepared


async def generate(serving: Serving, exchange: Exchange) -> None:
    await serve(serving, exchange, GenerateBody, _frames)


def _frames(owned: OwnedRequest, reader: Reader, prepared: Prepared) -> sse.Frames:
    return sse.GenerateFrames()
