"""GET /reservations: what tenants' limits hold open, for the audit. A JSON object a line:

{"request_id": 32 hexadecimal digits, "tenant", "priority", "tokens", "end_at": ms of the epoch}
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from streams.admission.limits import Limits, OpenReservation

# About 0.3 ms, so that no decision waits for more of them.
_AT_ONCE = 200


def open_reservations_route(limits: Limits) -> Route:
    async def answer(_: Request) -> Response:
        return StreamingResponse(_lines(limits), media_type="application/x-ndjson")

    return Route("/reservations", answer)


async def _lines(limits: Limits) -> AsyncIterator[bytes]:
    held = limits.open_reservations()
    while some := list(islice(held, _AT_ONCE)):
        yield b"".join(_line(each) for each in some)
        await asyncio.sleep(0)


def _line(held: OpenReservation) -> bytes:
    return msgspec.json.encode({**held._asdict(), "request_id": held.request_id.hex()}) + b"\n"
