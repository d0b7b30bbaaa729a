"""Whatever producers interleave, drop, double or say too late: all who fold agree, and no token is counted
twice or skipped.

The log is made by a small world of producers, each in its own order: admission, up to three runs, the owner,
an owner that was replaced. Honest runs say `token_at(position)`; strays say something else.
"""

import copy

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import (
    Admitted,
    Claim,
    Completion,
    Dispatched,
    Failed,
    Rejected,
    Retry,
)
from schemas.stream_state import PREFILL_LOST, ReplyRecord, Run, StreamState
from schemas.token_records import TokenChunk

RID = b"r" * 16
OLD_OWNER, OWNER, THIRD = 100, 101, 102
TOTAL = 6

Entry = tuple[Run | None, ReplyRecord | TokenChunk]


def token_at(position: int) -> int:
    return 1000 + position


def honest_run(run: Run, attempt: int, start: int, steps: list[tuple[int, int]], reason: str) -> list[Entry]:
    """Chunks of (new tokens, tokens said again before them), then a Completion."""
    log: list[Entry] = [(run, TokenChunk(RID, attempt, start, []))]
    position = start
    for size, again in steps:
        end, said = min(position + size, TOTAL), max(start, position - again)
        if end > position:
            ids = [token_at(p) for p in range(said, end)]
            log.append((run, TokenChunk(RID, attempt, said, ids, "length" if end == TOTAL else None)))
            position = end
    log.append((run, Completion(RID, attempt, *run, 3, 0, position, reason)))
    return log


def stray_run(run: Run, attempt: int, start: int) -> list[Entry]:
    return [
        (run, TokenChunk(RID, attempt, start, [1])),
        (run, TokenChunk(RID, attempt, start + 1, [2])),
        (run, Completion(RID, attempt, *run, 3, 0, start + 2, "length")),
    ]


def retry_by(attempt: int, owner: int) -> list[Entry]:
    return [(None, Retry(RID, attempt + 1, owner, "worker_lost"))]


def prefill_lost_by(attempt: int, owner: int) -> list[Entry]:
    return [(None, Retry(RID, attempt + 1, owner, PREFILL_LOST))]


def failed_by(attempt: int, owner: int) -> list[Entry]:
    return [(None, Failed(RID, attempt, owner, "worker_lost", ""))]


OWNERS_NEXT = [retry_by, prefill_lost_by, failed_by]


def apply(state: StreamState, entry: Entry) -> None:
    run, record = entry
    if isinstance(record, TokenChunk):
        assert run is not None
        state.apply_chunk(run, record)
    else:
        state.apply(record)


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """A log, written with the fold in hand, since its writers read it back before they act on it.

    A claimant speaks only once its Claim counted; runs of attempt 2 start where the Retry left the fold.
    """
    steps = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=5)
    first = honest_run(Run(0, 10), 1, 0, draw(steps), draw(st.sampled_from(["length", "cancelled", "error"])))
    dispatched = Dispatched(RID, 1, OLD_OWNER, 0, 10, "m")
    if draw(st.booleans()):
        dispatched.prefill_slot, dispatched.prefill_epoch = 5, 15
    why = draw(st.sampled_from(["x", PREFILL_LOST]))
    queues: list[list[Entry]] = [
        [(None, Admitted(RID, 1, OLD_OWNER, 0, 5)), (None, dispatched)],
        first[: draw(st.integers(0, len(first)))],
    ]
    optional: list[list[Entry]] = [
        [(None, Claim(OLD_OWNER, 1, OWNER))],
        [(None, Claim(OLD_OWNER, 2, THIRD))],
        [(None, Retry(RID, 2, OLD_OWNER, why)), (None, Failed(RID, 2, OLD_OWNER, "x", ""))],
        [(None, Rejected(RID, 1, 429, "rate_limited", "wait"))],
    ]
    queues += [queue for queue in optional if draw(st.booleans())]

    log: list[Entry] = []
    state = StreamState(RID)
    while queues := [queue for queue in queues if queue]:
        entry = draw(st.sampled_from(queues)).pop(0)
        fate = draw(st.sampled_from(["kept"] * 6 + ["dropped", "doubled"]))
        for _ in range({"dropped": 0, "kept": 1, "doubled": 2}[fate]):
            owner, attempt = state.owner_epoch, state.attempt
            log.append(entry)
            apply(state, entry)
            if state.owner_epoch != owner and state.owner_epoch in (OWNER, THIRD):
                queues.append(draw(st.sampled_from(OWNERS_NEXT))(state.attempt, state.owner_epoch))
            if state.attempt > attempt:
                second = honest_run(Run(2, 12), 2, len(state.token_ids), draw(steps), "length")
                queues.append(second[: draw(st.integers(0, len(second)))])
                queues.append([(None, Dispatched(RID, 2, OWNER, 2, 12, "m"))])
    if any(run is not None for run, _ in log) and draw(st.booleans()):
        # A stray comes after the bound run has spoken: before it, it would be the bound run.
        spoke = next(i for i, (run, _) in enumerate(log) if run is not None)
        for late in stray_run(Run(3, 13), draw(st.sampled_from([1, 2])), draw(st.integers(0, TOTAL))):
            log.insert(draw(st.integers(spoke + 1, len(log))), late)
    return log


def bound_honest(log: list[Entry]) -> bool:
    """False where the stray came first in some attempt and so is what the client got."""
    state = StreamState(RID)
    for entry in log:
        apply(state, entry)
        if state.run == Run(3, 13):
            return False
    return True


@given(logs())
def test_no_token_is_counted_twice_or_skipped(log: list[Entry]) -> None:
    state = StreamState(RID)
    for entry in log:
        apply(state, entry)
    if bound_honest(log):
        assert state.token_ids == [token_at(p) for p in range(len(state.token_ids))]
    if isinstance(state.end, Completion):
        assert state.end.output_tokens == len(state.token_ids)


@given(logs(), st.data())
def test_owner_late_reader_and_successor_agree(log: list[Entry], data: st.DataObject) -> None:
    owner = StreamState(RID)
    snapshots = [copy.deepcopy(owner)]
    for entry in log:
        apply(owner, entry)
        snapshots.append(copy.deepcopy(owner))
    # A reader that knows the owner from the public id, and one that starts from nothing.
    reader = StreamState(RID, owner_epoch=OLD_OWNER)
    for entry in log:
        apply(reader, entry)
    assert reader.token_ids == owner.token_ids
    assert (reader.attempt, reader.run, reader.end) == (owner.attempt, owner.run, owner.end)
    # A successor takes the state over in the middle and reads on.
    at = data.draw(st.integers(0, len(log)))
    successor = copy.deepcopy(snapshots[at])
    for entry in log[at:]:
        apply(successor, entry)
    assert successor == owner


@given(logs())
def test_what_is_counted_is_never_taken_back(log: list[Entry]) -> None:
    state = StreamState(RID)
    seen: list[int] = []
    for entry in log:
        apply(state, entry)
        assert state.token_ids[: len(seen)] == seen
        seen = list(state.token_ids)


@given(logs())
def test_a_final_end_stays(log: list[Entry]) -> None:
    state = StreamState(RID)
    final: object = None
    for entry in log:
        apply(state, entry)
        if final is not None:
            assert state.end is final
        elif state.ended and not state.may_retry:
            final = state.end


@given(logs())
def test_what_a_run_has_shown_to_have_is_not_taken_from_it_for_who_had_the_prompt(log: list[Entry]) -> None:
    state = StreamState(RID)
    for entry in log:
        shown = (state.attempt, state.run, state.last_sign_at) if state.prefill is None else None
        apply(state, entry)
        record = entry[1]
        if isinstance(record, Retry) and record.reason == PREFILL_LOST and shown is not None:
            assert (state.attempt, state.run, state.last_sign_at) == shown
        assert state.prefill is None or (state.run is not None and not state.token_ids)
