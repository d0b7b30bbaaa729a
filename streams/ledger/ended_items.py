"""Batch requests that ended a moment ago: what still runs of one is stopped, and its bill held. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from schemas.records import Cancellation, Completion, Dispatched, Usage
from schemas.stream_state import ReplyRecord, Run
from streams.ledger.batch_actions import Action, CancelRun, Seal
from streams.ledger.open_request import OpenRequest

KEPT_MS = 60_000
# Each takes about 500 bytes.
MOST = 5_000


@dataclass(slots=True)
class _Ended:
    """`run` said how it ended, None where none did. `row` is what its answer says that it costs, None once
    that is sealed."""

    tenant: str
    attempt: int
    run: Run | None
    row: Usage | None
    at_ms: int
    cancelled: set[Run] = field(default_factory=set)


class EndedItems:
    """The last MOST, for KEPT_MS.

    A request is billed what its answer says: the tokens that lie before its end, or nothing if it was
    refused, expired or cancelled before a run had it. Every run writes a row of its own. So where no row is
    sealed yet, the first run that shows behind the end has it sealed: a row of the same attempt might count
    for more, and any might count where the request costs nothing.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[bytes, _Ended] = OrderedDict()

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._ended

    def put(self, request: OpenRequest, row: Usage | None, now_ms: int) -> None:
        """`row`: what its answer says that it costs, if that is not sealed."""
        state, item = request.state, request.item
        run = state.run if isinstance(state.end, Completion) else None
        ended = _Ended(item.source.tenant, state.attempt, run, row, now_ms, set(request.cancelled))
        self._ended[item.request_id] = ended
        if len(self._ended) > MOST:
            self._ended.popitem(last=False)

    def expire(self, now_ms: int) -> None:
        while self._ended and now_ms - next(iter(self._ended.values())).at_ms >= KEPT_MS:
            self._ended.popitem(last=False)

    def on_record(self, request_id: bytes, record: ReplyRecord) -> list[Action]:
        """A record of one of them came behind its end. One that only ended may have told nothing before."""
        if not isinstance(record, Dispatched | Completion):
            return []
        run, goes_on = Run(record.slot, record.epoch), isinstance(record, Dispatched)
        return self.shown(request_id, run, record.attempt, goes_on=goes_on)

    def shown(self, request_id: bytes, run: Run, attempt: int, *, goes_on: bool = True) -> list[Action]:
        """This run had a request behind its end: for nobody, unless it is what ended it."""
        ended = self._ended[request_id]
        if (run, attempt) == (ended.run, ended.attempt):
            return []
        actions: list[Action] = []
        if goes_on and run not in ended.cancelled:
            ended.cancelled.add(run)
            stop = Cancellation(request_id, attempt, ended.tenant, "stray", run.slot, run.epoch)
            actions.append(CancelRun(stop))
        row = ended.row
        if row is not None and (attempt == ended.attempt or not row.input_tokens + row.output_tokens):
            actions.append(Seal(row))
            ended.row = None
        return actions
