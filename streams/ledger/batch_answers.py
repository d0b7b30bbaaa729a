"""What a batch shard has to answer and has not committed yet, of both doors. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from schemas.api.answers import own_usage
from schemas.api.errors import ApiError
from streams.ledger.batch_actions import Answer, FileAnswer
from streams.ledger.batch_item import BatchItem, FileSource, Source
from streams.ledger.batch_outcome import answer_body
from streams.ledger.batch_records import encode_answer, encode_error
from streams.ledger.file_lines import answer_line, error_line
from streams.ledger.open_line import LineEnd, OpenLine

# Answers: a line of several choices has as many.
REMEMBERED = 2_000
# Of memory, beside its line.
ANSWER_BYTES = 512


class BatchAnswers:
    """`topic` and `file` are taken by who writes them. Of a file's answers the request is read again after a
    crash until `release` says that they are committed; those of topics are committed when they are taken.

    `file_bytes` is what `file` takes of memory; `ended` how many requests of each job have ended, those of
    whole lines, since that was cleared.
    """

    def __init__(self) -> None:
        self.topic: list[Answer] = []
        self.file: list[FileAnswer] = []
        self.file_bytes = 0
        self.ended: Counter[str] = Counter()
        self._held: dict[bytes, int] = {}
        self._ends: OrderedDict[bytes, LineEnd] = OrderedDict()
        self._num_remembered = 0

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
            self.ended[answer.source.batch_id] += answer.sent

    def refuse(self, source: Source, value: bytes) -> None:
        """Answers a record that is no request."""
        self.topic.append(Answer(source, value, ok=False))

    def release(self, request_ids: Iterable[bytes]) -> None:
        """Their answers are part of the next commit."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def remembers(self, request_id: bytes) -> bool:
        return request_id in self._ends

    def again(self, item: BatchItem) -> bool:
        """Answers a record that a topic's producer wrote twice; False where the first is not known."""
        known = self._ends.get(item.request_id)
        if known is None or isinstance(item.source, FileSource):
            return False
        self._tell(item, item.source, known)
        return True

    def end(self, line: OpenLine, end: LineEnd) -> None:
        """The line ended so; it is not open any more."""
        request_id = line.item.request_id
        for source in line.sources:
            if isinstance(source, FileSource):
                self._held[request_id] = line.since
                self.add_line(_file_answer(line.item, source, end))
            else:
                self._tell(line.item, source, end)
        if not isinstance(line.item.source, FileSource):
            self._ends[request_id] = end
            self._num_remembered += _size(end)
        while self._num_remembered > REMEMBERED:
            self._num_remembered -= _size(self._ends.popitem(last=False)[1])

    def _tell(self, item: BatchItem, source: Source, end: LineEnd) -> None:
        if isinstance(end.outcome, ApiError):
            value = encode_error(source, item.request_id, end.outcome, _billed(end))
        else:
            value = encode_answer(source, item.request_id, answer_body(item, end.outcome))
        ok = not isinstance(end.outcome, ApiError)
        self.topic.append(Answer(source, value, ok, end.seals, item.request_id))


def _size(end: LineEnd) -> int:
    """In answers."""
    return 1 if isinstance(end.outcome, ApiError) else len(end.outcome)


def _billed(end: LineEnd) -> dict[str, int] | None:
    if not end.seals:
        return None
    return own_usage(end.input_tokens, end.cached_tokens, end.output_tokens)


def _file_answer(item: BatchItem, source: FileSource, end: LineEnd) -> FileAnswer:
    request_id, outcome = item.request_id, end.outcome
    if isinstance(outcome, ApiError):
        line, code = error_line(source.custom_id, request_id, outcome), outcome.code
    else:
        line, code = answer_line(source.custom_id, request_id, answer_body(item, outcome)), None
    return FileAnswer(
        source,
        request_id,
        line,
        code,
        end.input_tokens,
        end.cached_tokens,
        end.output_tokens,
        end.seals,
        sent=item.num_requests,
    )
