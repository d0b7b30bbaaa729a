"""Several choices in one stream of OpenAI's, as their tokens come."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.ends import DISCONNECTED
from gateway.event_stream import respond_when_bound
from gateway.exchange import ClientGoneError, Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader, StreamReader
from gateway.sse import OpenAIFrames
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared
from schemas.records import Completion

_SLOW_READER = "slow_reader"


class Choice(NamedTuple):
    """One of the answers to a body: a request of its own."""

    owned: OwnedRequest
    reader: Reader
    prepared: Prepared


def failure_of(choices: Sequence[Choice]) -> str | None:
    """Why those that go on should be stopped, for one has failed; None if none has.

    A client that reads too slowly may come back, as one that left may.
    """
    codes = [choice.reader.end.code for choice in choices if isinstance(choice.reader.end, ApiError)]
    if not codes:
        return None
    return DISCONNECTED if codes[0] == _SLOW_READER else codes[0]


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
            taken = reader.take()
            if taken is not None:
                parts.append(each.text(*taken))
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
        if not body:
            await Reader.wait_any(readers)
