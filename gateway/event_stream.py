"""From a reader to the bytes of a stream's response."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gateway import sse, stream_writer
from gateway.exchange import ClientGoneError, Exchange
from gateway.reader import Reader, StreamReader
from gateway.stream_writer import StreamWriter
from schemas.api.errors import ApiError
from schemas.records import Completion


async def watch(exchange: Exchange, *readers: Reader) -> None:
    """Tells `readers` when their client is gone. A task beside the one that writes."""
    await exchange.disconnected()
    for reader in readers:
        reader.on_disconnect()


async def write_events(
    exchange: Exchange, reader: StreamReader, make_frames: Callable[[], sse.Frames]
) -> None:
    """The response of a stream, from its status to its last event.

    Raises ApiError while nothing was sent, ClientGoneError for a client that left or does not read.
    """
    await respond_when_bound(exchange, [reader], lambda: _events(exchange, reader, make_frames))


async def respond_when_bound(
    exchange: Exchange, readers: Sequence[StreamReader], write: Callable[[], Awaitable[None]]
) -> None:
    """The response to the client of all `readers`: its status, then what `write` sends. Raises as above."""
    # 1. Nothing is said before all runs are bound, so that a refusal is a real status.
    while not (all(reader.bound for reader in readers) or any(reader.keep_alive_due for reader in readers)):
        if readers[0].disconnected:
            raise ClientGoneError
        for reader in readers:
            if isinstance(reader.end, ApiError):
                raise reader.end
        if all(reader.bound or reader.end is not None for reader in readers):
            break
        await Reader.wait_any(readers)
    await Reader.all_heard(readers)
    task = asyncio.current_task()
    assert task is not None
    for reader in readers:
        reader.on_stuck = task.cancel
    try:
        await exchange.start(200, sse.HEADERS)
        await write()
    except asyncio.CancelledError:
        # 3. The client has read nothing for too long; whoever else cancels means it.
        if not any(reader.stuck for reader in readers):
            raise
        task.uncancel()
        raise ClientGoneError from None


async def _events(
    exchange: Exchange,
    reader: StreamReader,
    make_frames: Callable[[], sse.Frames],
) -> None:
    # 2. From here on an error is an event, and the stream ends without its normal end.
    send, frames = exchange.send, make_frames()
    message: dict[str, Any] = {"type": "http.response.body", "body": frames.first(), "more_body": True}
    if message["body"]:
        await send(message)
    text_frame, take = frames.text, reader.take
    writer = exchange.scope.get(stream_writer.KEY)
    if writer is not None:
        reader.push = lambda: _push(writer, reader, text_frame)
    while not reader.disconnected:
        parts = [text_frame(text, position) for text, position in take()]
        end = reader.end
        if end is not None and not reader.has_more:
            parts.append(frames.done(end) if isinstance(end, Completion) else frames.error(end))
            message["more_body"] = False
        if not parts and reader.keep_alive_due:
            parts.append(frames.keep_alive())
        reader.keep_alive_due = False
        if parts:
            message["body"] = b"".join(parts)
            await send(message)
            if not message["more_body"]:
                return
        elif not reader.has_more:
            await reader.wait()
    raise ClientGoneError


def _push(writer: StreamWriter, reader: StreamReader, text_frame: Callable[[str, int], bytes]) -> bool:
    """Writes new text at once: a task to wake and a coroutine to send cost more than all else of a token."""
    if reader.end is not None or reader.disconnected or not writer.ready:
        return False
    pieces = reader.take()
    if len(pieces) == 1:  # nearly always
        body = text_frame(*pieces[0])
    else:
        body = b"".join([text_frame(text, position) for text, position in pieces])
    if body:
        writer.write(body)
    return not reader.has_more
