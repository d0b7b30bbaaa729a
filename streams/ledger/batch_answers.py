"""What a batch shard has to answer and has not committed yet, of both doors. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from schemas.api.answers import Finished
from schemas.api.errors import ApiError
from schemas.records import Completion, Usage
from streams.ledger.batch_actions import Answer, FileAnswer
from streams.ledger.batch_item import BatchItem, FileSource, Source
from streams.ledger.batch_outcome import Outcome, answer_body, sealed_usage
from streams.ledger.batch_records import encode_answer, encode_error
from streams.ledger.file_lines import answer_line, error_line
from streams.ledger.open_request import OpenRequest

REMEMBERED = 2_000
# Of memory, beside its line.
ANSWER_BYTES = 512


class BatchAnswers:
    """`topic` and `file` are taken by who writes them. Of a file's answers the request is read again after a
    crash until `release` says that they are committed; those of topics are committed when they are taken.

    `file_bytes` is what `file` takes of memory; `ended` how many requests of each job have ended since that
    was cleared.
    """

    def __init__(self) -> None:
        self.topic: list[Answer] = []
        self.file: list[FileAnswer] = []
        self.file_bytes = 0
        self.ended: Counter[str] = Counter()
        self._held: dict[bytes, int] = {}
        self._outcomes: OrderedDict[bytes, tuple[Outcome, Usage | None]] = OrderedDict()

    @property
    def low(self) -> int | None:
        """The lowest place in the reply partition that an answer is held from."""
        return min(self._held.values(), default=None)

    def take_file(self) -> list[FileAnswer]:
        """Those to be written now."""
        taken, self.file, self.file_bytes = self.file, [], 0
        return taken

    def add_line(self, answer: FileAnswer) -> None:
        """A line that ended without having been a request, or as one."""
        self.file.append(answer)
        self.file_bytes += len(answer.line) + ANSWER_BYTES
        if answer.sent:
            self.ended[answer.source.batch_id] += 1

    def release(self, request_ids: Iterable[bytes]) -> None:
        """Their answers are part of the next commit."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def remembers(self, request_id: bytes) -> bool:
        return request_id in self._outcomes

    def again(self, item: BatchItem) -> bool:
        """Answers a record that a topic's producer wrote twice; False where the first is not known."""
        known = self._outcomes.get(item.request_id)
        if known is None or isinstance(item.source, FileSource):
            return False
        self._tell(item, item.source, *known)
        return True

    def end(self, request: OpenRequest, outcome: Outcome) -> Usage | None:
        """The request ended so; it is not open any more. Returns its owner's row, if it has one."""
        seal = sealed_usage(request, outcome)
        for source in request.sources:
            if isinstance(source, FileSource):
                self._held[request.item.request_id] = request.since
                self.add_line(_file_answer(request, source, outcome, seal))
            else:
                self._tell(request.item, source, outcome, seal)
                self._outcomes[request.item.request_id] = outcome, seal
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        return seal

    def _tell(self, item: BatchItem, source: Source, outcome: Outcome, seal: Usage | None) -> None:
        if isinstance(outcome, ApiError):
            value = encode_error(source, item.request_id, outcome, _billed(seal))
        else:
            value = encode_answer(source, item.request_id, answer_body(item, outcome))
        self.topic.append(Answer(source, value, isinstance(outcome, Finished), seal, item.request_id))


def _billed(seal: Usage | None) -> dict[str, int] | None:
    if seal is None:
        return None
    return {
        "input_tokens": seal.input_tokens,
        "cached_tokens": seal.cached_tokens,
        "output_tokens": seal.output_tokens,
    }


def _file_answer(
    request: OpenRequest, source: FileSource, outcome: Outcome, seal: Usage | None
) -> FileAnswer:
    request_id, end = request.item.request_id, request.state.end
    if isinstance(outcome, Finished):
        line, code = answer_line(source.custom_id, request_id, answer_body(request.item, outcome)), None
    else:
        line, code = error_line(source.custom_id, request_id, outcome), outcome.code
    row = seal or (end if isinstance(end, Completion) else None)
    if row is None:
        return FileAnswer(source, request_id, line, code, sent=True)
    return FileAnswer(
        source,
        request_id,
        line,
        code,
        row.input_tokens,
        row.cached_tokens,
        row.output_tokens,
        seal,
        sent=True,
    )
