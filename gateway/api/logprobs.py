"""From what a reader was told to the `logprobs` objects of a stream."""

from typing import Any

from gateway import sse
from gateway.reader import Reader
from schemas.api.logprobs import Shape
from schemas.records import Completion


def taken_logprobs(reader: Reader, shape: Shape) -> sse.Logprobs | None:
    """What frames ask for the tokens of a piece of text; None where the request wants none."""
    told = reader.told
    if told is None:
        return None

    def take(position: int | None) -> dict[str, Any] | None:
        end = reader.end
        tokens = told.take(position, end if isinstance(end, Completion) else None)
        return shape(tokens) if tokens else None

    return take
