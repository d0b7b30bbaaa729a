"""Whether each item of a batch has its one result, at the topics' door and in files. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from infra.audit.checks import ITEM_GRACE_MS, Tolerances
from infra.audit.findings import Figures, Finding, Kind
from infra.audit.request_log import RequestLog
from schemas.api.batches import ENDED
from schemas.records import BatchJob, BatchState
from streams.ledger.file_lines import item_request_id


class TopicDoor:
    """What tenants' own clients asked for, and what they were answered. About 200 bytes a request."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[str, bytes]] = Counter()
        self._answered: Counter[tuple[str, bytes]] = Counter()

    def __len__(self) -> int:
        return len(self._asked)

    def asked(self, tenant: str, request_id: bytes) -> None:
        self._asked[tenant, request_id] += 1

    def answered(self, tenant: str, request_id: bytes) -> None:
        """Committed records alone count."""
        self._answered[tenant, request_id] += 1

    def judge(self, requests: RequestLog) -> Iterator[Finding]:
        """Of this pass. Each record is answered, also one that its producer wrote twice."""
        for (tenant, request_id), asked in self._asked.items():
            if not requests.has(request_id):
                continue
            answered = self._answered[tenant, request_id]
            history = requests.get(request_id)
            over = history is not None and history.is_over
            if answered > asked:
                yield _finding(Kind.DOUBLED_RESULT, tenant, request_id, asked=asked, answered=answered)
            elif answered < asked and over:
                yield _finding(Kind.LOST_RESULT, tenant, request_id, asked=asked, answered=answered)


def judge_job(state: BatchState, lines: Mapping[str, Counter[str]]) -> Iterator[Finding]:
    """`lines`: by kind, output or error, the ids of the lines that the state speaks of."""
    seen = lines["output"] + lines["error"]
    wanted = {f"batch_req_{item_request_id(state.batch_id, index).hex()}" for index in range(state.total)}
    for line_id, count in seen.items():
        if count > 1 or line_id not in wanted:
            yield _of_line(Kind.DOUBLED_RESULT, state, line_id, lines=count)
    ended = state.completed + state.failed + state.expired + state.cancelled
    num_output, num_error = lines["output"].total(), lines["error"].total()
    if state.status in ENDED and state.status != "failed":
        for line_id in sorted(wanted - seen.keys()):
            yield _of_line(Kind.LOST_RESULT, state, line_id, lines=0)
        if ended != state.total:
            yield _of_state(state, counted=ended, total=state.total)
    elif state.status not in ENDED and num_output + num_error != (
        listed := state.low_index + sum(byte.bit_count() for byte in state.ended)
    ):
        yield _of_state(state, lines=num_output + num_error, ended=listed)
    if (num_output, num_error) != (state.completed, ended - state.completed):
        yield _of_state(state, output=num_output, completed=state.completed, error=num_error, ended=ended)


def judge_time(
    job: BatchJob, state: BatchState | None, now_ms: int, allowed: Tolerances
) -> Iterator[Finding]:
    """`state`: the last that was said of it, None where nothing was."""
    late_ms = now_ms - job.created_at - job.completion_window_ms
    if late_ms > allowed.deadline_ms + ITEM_GRACE_MS and (state is None or state.status not in ENDED):
        status = "none" if state is None else state.status
        figures: Figures = {"batch_id": job.batch_id, "status": status, "late_ms": late_ms}
        yield Finding(Kind.PAST_DEADLINE, None, job.tenant, figures)


def billed_of(state: BatchState, requests: RequestLog) -> tuple[int, int]:
    """(input, output) tokens of the rows of its items that are in this pass."""
    histories = (requests.get(item_request_id(state.batch_id, index)) for index in range(state.total))
    rows = [history.row for history in histories if history is not None and history.row is not None]
    return sum(row.input_tokens for row in rows), sum(row.output_tokens for row in rows)


def judge_sums(states: Iterable[BatchState], billed: Mapping[str, tuple[int, int]]) -> Iterator[Finding]:
    """Of ended batches: `billed` is `billed_of` over all passes, by batch."""
    for state in states:
        if state.status in ENDED and billed[state.batch_id] != (state.input_tokens, state.output_tokens):
            input_tokens, output_tokens = billed[state.batch_id]
            yield _of_state(
                state,
                input_tokens=state.input_tokens,
                output_tokens=state.output_tokens,
                billed_input=input_tokens,
                billed_output=output_tokens,
            )


def _of_line(kind: Kind, state: BatchState, line_id: str, **figures: int | str) -> Finding:
    request_id = line_id.removeprefix("batch_req_")
    return Finding(kind, request_id, state.tenant, {"batch_id": state.batch_id, **figures})


def _of_state(state: BatchState, **figures: int | str) -> Finding:
    return Finding(
        Kind.BATCH_COUNTS,
        None,
        state.tenant,
        {"batch_id": state.batch_id, "status": state.status, **figures},
    )


def _finding(kind: Kind, tenant: str, request_id: bytes, **figures: int | str) -> Finding:
    return Finding(kind, request_id.hex(), tenant, figures)
