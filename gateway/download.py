"""A response whose body comes piece by piece from elsewhere than a model."""

import asyncio
from collections.abc import AsyncIterator

from gateway.exchange import ClientGoneError, Exchange, HeaderPairs


async def send_pieces(
    exchange: Exchange, headers: HeaderPairs, pieces: AsyncIterator[bytes], write_timeout_s: float
) -> None:
    """A response with status 200. The next of `pieces` is asked for when the client has taken the last one.

    Raises what the first piece raises while nothing was sent; ClientGoneError for a client that left, or took
    nothing for `write_timeout_s`.
    """
    first = await anext(pieces, None)
    await exchange.start(200, headers)
    gone = asyncio.create_task(exchange.disconnected())
    try:
        piece = first
        while piece is not None:
            if gone.done():
                raise ClientGoneError
            async with asyncio.timeout(write_timeout_s):
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await anext(pieces, None)
        await exchange.send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        raise ClientGoneError from None
    finally:
        gone.cancel()
