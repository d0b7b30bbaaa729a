"""A line of either door while its choices run: a request each, and one answer for all. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from schemas.api.answers import Finished
from schemas.api.errors import ApiError
from schemas.records import Completion, Usage
from streams.ledger.batch_item import BatchItem, FileSource, Source

Outcome = Finished | ApiError


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """`seal`: its owner's row, if it has one; `row`: what is billed of it, None for nothing. `refused`: it
    has no answer and never ran, and nobody asked for its end."""

    outcome: Outcome
    seal: Usage | None
    row: Usage | Completion | None
    refused: bool


@dataclass(frozen=True, slots=True)
class LineEnd:
    """`outcome`: the answers of its choices, in order, or why there are none. The tokens are those billed."""

    outcome: tuple[Finished, ...] | ApiError
    seals: Sequence[Usage]
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class OpenLine:
    """`sources` has more than one where a producer wrote the same line twice. `since` is where the reply
    partition must be read from to learn of all its choices, those among them that have ended. `error`: one of
    them has no answer, so the line has none, and the others are to be stopped."""

    item: BatchItem
    since: int
    sources: list[Source | FileSource]
    error: ApiError | None = None
    _waived: bool = False
    _ends: dict[bytes, ChoiceEnd] = field(default_factory=dict)

    def end(self, request_id: bytes, end: ChoiceEnd) -> LineEnd | None:
        """One of its choices ended so. How the line does, once all have.

        As online: where what failed first had not run, the line was refused as a whole, and the choices that
        ran meanwhile cost nothing; else each is billed what it did.
        """
        if self.error is None and isinstance(end.outcome, ApiError):
            self.error, self._waived = end.outcome, end.refused
        self._ends[request_id] = end
        if len(self._ends) < self.item.num_requests:
            return None
        ends = [self._ends[each] for each in self.item.request_ids()]
        seals = [end.seal for end in ends if end.seal is not None]
        rows = [end.row for end in ends if end.row is not None]
        if self._waived:
            seals = [_waived(seal) for seal in seals]
            rows = [*seals]
        answers = tuple(end.outcome for end in ends if isinstance(end.outcome, Finished))
        return LineEnd(
            answers if self.error is None else self.error,
            seals,
            sum(row.input_tokens for row in rows),
            sum(row.cached_tokens for row in rows),
            sum(row.output_tokens for row in rows),
        )


def _waived(seal: Usage) -> Usage:
    return replace(seal, input_tokens=0, cached_tokens=0, output_tokens=0, finish_reason="cancelled")
