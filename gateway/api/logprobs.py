"""From what a reader was told to the `logprobs` objects of an answer, whole or streamed."""

from typing import Any

from gateway import sse
from gateway.reader import Reader
from schemas.api.logprobs import SHAPES, chat_logprobs
from schemas.api.prepare import Prepared
from schemas.records import Completion
from schemas.tokenization import Tokenizer


def whole_logprobs(reader: Reader, prepared: Prepared, end: Completion) -> dict[str, Any] | None:
    """Of all tokens that are shown; None where the request wants none."""
    if reader.told is None:
        return None
    return SHAPES[prepared.url](prepared.model.tokenizer)(reader.told.take(None, end))


def streamed_logprobs(reader: Reader, prepared: Prepared) -> sse.Logprobs | None:
    """What frames ask for the tokens of a piece of text; None where the request wants none."""
    told = reader.told
    if told is None:
        return None
    shape = SHAPES[prepared.url](prepared.model.tokenizer)

    def take(position: int | None) -> dict[str, Any] | None:
        end = reader.end
        tokens = told.take(position, end if isinstance(end, Completion) else None)
        return shape(tokens) if tokens else None

    return take


def told_logprobs(reader: Reader, tokenizer: Tokenizer, position: int | None) -> list[dict[str, Any]]:
    """As /v1/responses lists them, chat's way: of the tokens up to a position (None: all) that were not asked
    for before; empty where none are told."""
    if reader.told is None:
        return []
    tokens = reader.told.take(position, reader.end if isinstance(reader.end, Completion) else None)
    content: list[dict[str, Any]] = chat_logprobs(tokenizer)(tokens)["content"]
    return content
