"""Several choices in one stream of OpenAI's, as their tokens come."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.event_stream import respond_when_bound
from gateway.exchange import ClientGoneError, Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader, StreamReader
from gateway.sse import OpenAIFrames
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared
from schemas.records import Completion


class Choice(NamedTuple):
    """One of the answers to a body: a request of its own."""

    owned: OwnedRequest
    reader: Reader
    prepared: Prepared


def failure_of(choices: Sequence[Choice]) -> str | None:
    """Why those that go on should be stopped, for one has failed; None if none has."""
    return next((c.reader.end.code for c in choices if isinstance(c.reader.end, ApiError)), None)


def has_failed(choices: Sequence[Choice]) -> bool:
    """One of them ran and failed; false for a refusal."""
    return any(c.reader.bound and isinstance(c.reader.end, ApiError) for c in choices)


async def write_choices(
    exchange: Exchange,
    readers: Sequence[StreamReader],
    make_frames: Callable[[], Sequence[OpenAIFrames]],
) -> None:
    """The response of a stream, from its status to its last event: the chunks of each choice in their order
    with one that says its end, and behind the last the end of the stream. A choice that fails ends it with an
    error.

    Raises ApiError while nothing was sent, ClientGoneError for a client that left or does not read.
    """
    await respond_when_bound(exchange, readers, lambda: _chunks(exchange, readers, make_frames()))


async def _chunks(
    exchange: Exchange, readers: Sequence[StreamReader], frames: Sequence[OpenAIFrames]
) -> None:
    completions: dict[int, Completion] = {}
    body = b"".join(each.first() for each in frames)
    more = True
    while True:
        if body:
            await exchange.send({"type": "http.response.body", "body": body, "more_body": more})
        if not more:
            return
        if readers[0].disconnected:
            raise ClientGoneError
        # All that has come since the last write is one write.
        parts: list[bytes] = []
        for index, (reader, each) in enumerate(zip(readers, frames, strict=True)):
            parts += [each.text(text, position) for text, position in reader.take()]
            if reader.has_more:
                continue
            if isinstance(reader.end, ApiError):
                parts.append(each.error(reader.end))
                more = False
                break
            if reader.end is not None and index not in completions:
                completions[index] = reader.end
                parts.append(each.finish(reader.end))
        else:
            if len(completions) == len(readers):
                parts.append(frames[0].end([*completions.values()], None))
                more = False
        if not parts and any(reader.keep_alive_due for reader in readers):
            parts.append(frames[0].keep_alive())
        for reader in readers:
            reader.keep_alive_due = False
        body = b"".join(parts)
        if not body and not any(reader.has_more for reader in readers):
            await Reader.wait_any(readers)
