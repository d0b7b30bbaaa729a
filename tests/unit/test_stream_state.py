"""The fold of a reply partition: the table of architecture §4, row by row."""

from dataclasses import replace

import pytest

from schemas.records import (
    Admitted,
    Attach,
    Claim,
    Completion,
    Detach,
    Dispatched,
    Failed,
    Rejected,
    Retry,
)
from schemas.stream_state import Effect, Gap, Run, StreamState
from schemas.token_records import TokenChunk

RID = bytes(range(16))
OWNER, OTHER_OWNER = 100, 200
A, B = Run(0, 10), Run(1, 11)


def state(owner_epoch: int | None = None) -> StreamState:
    return StreamState(RID, owner_epoch)


def admitted(attempt: int = 1) -> Admitted:
    return Admitted(RID, attempt, OWNER, requests_partition=0, requests_offset=5)


def dispatched(run: Run = A, attempt: int = 1) -> Dispatched:
    return Dispatched(RID, attempt, OWNER, run.slot, run.epoch, "m")


def chunk(position: int, *ids: int, attempt: int = 1, finish: str | None = None) -> TokenChunk:
    return TokenChunk(RID, attempt, position, list(ids), finish)


def completion(n: int, run: Run = A, attempt: int = 1, reason: str = "stop") -> Completion:
    return Completion(RID, attempt, run.slot, run.epoch, 3, 0, n, reason)


def retry(attempt: int = 2, owner: int = OWNER) -> Retry:
    return Retry(RID, attempt, owner, "worker_lost")


def test_a_request_from_queue_to_end() -> None:
    s = state()
    assert s.apply(admitted()) is Effect.ADMITTED
    assert s.apply(dispatched(), 1000) is Effect.BOUND
    assert s.apply_chunk(A, chunk(0, 7), 1010) is Effect.TOKENS
    assert s.apply_chunk(A, chunk(1, 8, 9, finish="length"), 1020) is Effect.TOKENS
    assert s.apply(completion(3, reason="length")) is Effect.ENDED
    assert (s.token_ids, s.run, s.owner_epoch, s.ended) == ([7, 8, 9], A, OWNER, True)


def test_tokens_before_dispatched_bind_the_run() -> None:
    s = state()
    assert s.apply_chunk(A, chunk(0, 7)) is Effect.TOKENS
    assert (s.run, s.model) == (A, None)
    assert s.apply(dispatched(A)) is Effect.BOUND
    assert s.model == "m"
    assert s.apply(dispatched(A)) is Effect.IGNORED
    assert s.apply(dispatched(B)) is Effect.STRAY


def test_what_admission_lets_it_have_counts_for_the_run_that_is_bound() -> None:
    s = state()
    s.apply_chunk(A, chunk(0, 7))
    known = []
    for record in (
        replace(dispatched(B), max_tokens=3),
        replace(dispatched(A), max_tokens=5),
        retry(),
        dispatched(B, attempt=2),
    ):
        s.apply(record)
        known.append(s.max_tokens)
    assert known == [None, 5, 5, 5]


def test_an_empty_chunk_is_a_sign_of_life() -> None:
    s = state()
    assert s.apply_chunk(A, chunk(0), 50) is Effect.BOUND
    assert s.apply_chunk(A, chunk(0), 1050) is Effect.ALIVE
    assert s.last_sign_at == 1050


def test_a_chunk_said_twice_counts_once_and_an_overlap_counts_its_new_part() -> None:
    s = state()
    s.apply_chunk(A, chunk(0, 7, 8))
    assert s.apply_chunk(A, chunk(0, 7, 8)) is Effect.IGNORED
    assert s.apply_chunk(A, chunk(1, 8, 9)) is Effect.TOKENS
    assert s.token_ids == [7, 8, 9]


def test_a_gap_stops_the_attempt_until_a_retry() -> None:
    s = state()
    s.apply_chunk(A, chunk(0, 7))
    assert s.apply_chunk(A, chunk(2, 9)) is Effect.GAP
    assert s.gap == Gap(1, 2)
    assert s.apply_chunk(A, chunk(1, 8)) is Effect.IGNORED
    assert s.apply(completion(3)) is Effect.IGNORED
    assert s.apply(retry()) is Effect.RETRIED
    assert s.apply_chunk(B, chunk(1, 8, attempt=2)) is Effect.TOKENS
    assert s.apply(completion(2, B, attempt=2)) is Effect.ENDED
    assert s.token_ids == [7, 8]


def test_a_completion_that_counts_more_than_the_fold_is_a_gap() -> None:
    s = state()
    s.apply_chunk(A, chunk(0, 7))
    assert s.apply(completion(2)) is Effect.GAP
    assert not s.ended


def test_a_completion_binds_the_run_that_says_it() -> None:
    s = state()
    assert s.apply(completion(0, reason="error")) is Effect.ENDED
    assert s.run == A


def test_another_run_of_the_same_attempt_is_a_stray() -> None:
    s = state()
    s.apply(dispatched(A))
    assert s.apply_chunk(B, chunk(0, 1)) is Effect.STRAY
    assert s.apply(completion(0, B)) is Effect.IGNORED
    assert s.strays == {B}
    assert s.token_ids == []


def test_the_old_run_is_a_stray_after_a_retry() -> None:
    s = state()
    s.apply(dispatched(A))
    s.apply_chunk(A, chunk(0, 7))
    s.apply(retry())
    assert s.apply_chunk(A, chunk(1, 8)) is Effect.STRAY
    assert s.apply(dispatched(A)) is Effect.STRAY
    assert s.apply_chunk(B, chunk(1, 9, attempt=2)) is Effect.TOKENS
    assert s.token_ids == [7, 9]


def test_rejected_counts_only_while_no_run_is_bound() -> None:
    rejected = Rejected(RID, 1, 429, "rate_limited", "wait", 1000)
    s = state()
    s.apply(dispatched(A))
    assert s.apply(rejected) is Effect.IGNORED
    s = state()
    assert s.apply(rejected) is Effect.ENDED
    assert s.end is rejected
    assert s.apply_chunk(A, chunk(0, 1)) is Effect.STRAY


def test_a_completion_that_came_first_wins_over_a_retry() -> None:
    s = state()
    s.apply_chunk(A, chunk(0, 7))
    s.apply(completion(1))
    assert s.apply(retry()) is Effect.IGNORED
    assert s.attempt == 1


@pytest.mark.parametrize("reason", ["cancelled", "error", "engine_fault"])
def test_a_failed_attempt_may_be_retried(reason: str) -> None:
    s = state(owner_epoch=OWNER)
    s.apply_chunk(A, chunk(0, 7))
    assert s.apply(completion(1, reason=reason)) is Effect.ENDED
    assert s.may_retry
    assert s.apply(retry()) is Effect.RETRIED
    assert (s.ended, s.attempt, s.run, s.token_ids) == (False, 2, None, [7])


def test_retry_counts_only_from_the_owner_and_only_one_step() -> None:
    s = state(owner_epoch=OWNER)
    assert s.apply(retry(owner=OTHER_OWNER)) is Effect.IGNORED
    assert s.apply(retry(attempt=3)) is Effect.IGNORED
    assert s.apply(retry()) is Effect.RETRIED
    assert s.apply(retry()) is Effect.IGNORED


def test_of_two_claimants_the_first_wins_and_the_old_owner_is_out() -> None:
    s = state(owner_epoch=OWNER)
    assert s.apply(Claim(OWNER, 1, OTHER_OWNER, RID)) is Effect.CLAIMED
    assert s.apply(Claim(OWNER, 2, 300)) is Effect.IGNORED
    assert s.apply(retry(owner=OWNER)) is Effect.IGNORED
    assert s.apply(retry(owner=OTHER_OWNER)) is Effect.RETRIED


def test_a_claim_for_another_request_is_not_ours() -> None:
    assert state(owner_epoch=OWNER).apply(Claim(OWNER, 1, OTHER_OWNER, bytes(16))) is Effect.IGNORED


def test_the_owner_ends_what_no_run_will_end() -> None:
    s = state(owner_epoch=OWNER)
    s.apply_chunk(A, chunk(0, 7))
    assert s.apply(Failed(RID, 1, OTHER_OWNER, "worker_lost", "")) is Effect.IGNORED
    assert s.apply(Failed(RID, 1, OWNER, "worker_lost", "")) is Effect.ENDED
    assert s.apply(completion(1)) is Effect.IGNORED
    assert s.apply(retry()) is Effect.IGNORED
    assert s.apply_chunk(A, chunk(1, 8)) is Effect.STRAY


def test_failed_after_a_completion_is_too_late() -> None:
    s = state(owner_epoch=OWNER)
    s.apply(completion(0))
    assert s.apply(Failed(RID, 1, OWNER, "worker_lost", "")) is Effect.IGNORED


def test_readers_come_and_go() -> None:
    s = state()
    for _ in range(2):
        assert s.apply(Attach(RID, 3, 30)) is Effect.READERS
    assert s.apply(Detach(RID, 4, 40, 0)) is Effect.IGNORED
    assert s.apply(Detach(RID, 3, 30, 5000)) is Effect.READERS
    assert s.readers == {(3, 30): 1}
    s.apply(Detach(RID, 3, 30, 7000))
    assert (s.readers, s.detach_ms) == ({}, 7000)
