"""From a reader to the bytes of a stream's response."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway import sse
from gateway.exchange import ClientGoneError, Exchange
from gateway.reader import Reader, StreamReader
from schemas.api.errors import ApiError
from schemas.records import Completion


async def watch(exchange: Exchange, reader: Reader) -> None:
    """Tells `reader` when its client is gone. A task beside the one that writes."""
    await exchange.disconnected()
    reader.on_disconnect()


async def write_events(
    exchange: Exchange, reader: StreamReader, make_frames: Callable[[], sse.Frames]
) -> None:
    """The response of a stream, from its status to its last event.

    Raises ApiError while nothing was sent, ClientGoneError for a client that left or does not read.
    """
    # 1. Nothing is said before a run is bound, so that a refusal is a real status.
    while not (reader.bound or reader.keep_alive_due):
        if reader.disconnected:
            raise ClientGoneError
        if isinstance(reader.end, ApiError):
            raise reader.end
        if reader.end is not None:
            break
        await reader.wait()
    task = asyncio.current_task()
    assert task is not None
    reader.on_stuck = task.cancel
    try:
        await exchange.start(200, sse.HEADERS)
        await _events(exchange.send, reader, make_frames)
    except asyncio.CancelledError:
        # 3. The client has read nothing for too long; whoever else cancels means it.
        if not reader.stuck:
            raise
        task.uncancel()
        raise ClientGoneError from None


async def _events(
    send: Callable[[dict[str, Any]], Awaitable[None]],
    reader: StreamReader,
    make_frames: Callable[[], sse.Frames],
) -> None:
    # 2. From here on an error is an event, and the stream ends without its normal end.
    frames = make_frames()
    message: dict[str, Any] = {"type": "http.response.body", "body": frames.first(), "more_body": True}
    if message["body"]:
        await send(message)
    text_frame, take = frames.text, reader.take
    while not reader.disconnected:
        taken = take()
        if taken is not None:
            message["body"] = text_frame(*taken)
            await send(message)
        elif reader.end is not None:
            end = reader.end
            last = frames.done(end) if isinstance(end, Completion) else frames.error(end)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        elif reader.keep_alive_due:
            reader.keep_alive_due = False
            message["body"] = frames.keep_alive()
            await send(message)
        else:
            await reader.wait()
    raise ClientGoneError
