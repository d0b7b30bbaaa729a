"""The owner's decisions, without Kafka and without a clock."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.actions import Action, Bill, Cancel, Reply, Restated, SendRequest
from gateway.lifecycle import STALLED_MS
from gateway.metrics import Timing
from gateway.own_streams import OwnStreams
from gateway.owned_request import OwnedRequest
from gateway.owner import Owner, reply_partition, reply_partitions
from gateway.reader import WholeReader
from gateway.resend import should_send_again
from schemas import topics
from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.records import (
    Admitted,
    Completion,
    Dispatched,
    Failed,
    Heartbeat,
    Left,
    PartitionStatus,
    Rejected,
    Retry,
    Tokens,
    Usage,
    WorkerStatus,
)
from schemas.token_records import TokenChunk
from streams.ledger.billing import version
from tests.fleet_driver import worker_status
from tests.gateway_factories import EPOCH, SLOT, WORKER_EPOCH, inference_request

RID = bytes(range(16))
NOW = 2_000


class Desk:
    """An owner with one request, and a log whose clock is moved by hand."""

    def __init__(self) -> None:
        self.owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
        self.view = FleetView()
        self.view.watch_as("gateway", SLOT, EPOCH)
        self.reader = WholeReader("simulated", Timing(), 0.0)
        self.owned: OwnedRequest = self.owner.accept(inference_request(RID), self.reader)
        self.owner.on_sent(self.owned, 100)
        self.status = PartitionStatus(self.owned.partition, 0, 0, [])
        self.worker: WorkerStatus | None = None
        self.silent: set[str] = set()
        self.time = 1_000_000
        self.restated: list[Action] = []

    def pass_ms(self, duration: int) -> list[Action]:
        """Heartbeats every 100 ms, and a tick after each."""
        actions: list[Action] = []
        for _ in range(duration // 100):
            self.time += 100
            for role, slot, epoch in (
                ("gateway", SLOT, EPOCH),
                ("admission", 0, 9),
                ("worker", 0, WORKER_EPOCH),
            ):
                if role not in self.silent:
                    partitions = [self.status] if role == "admission" else []
                    status = self.worker if role == "worker" else None
                    beat = Heartbeat(role, slot, epoch, b"", worker=status, partitions=partitions)
                    self.view.on_heartbeat(beat, self.time)
            for action in self.owner.tick(self.view, NOW, 0.0):
                (self.restated if isinstance(action, Restated) else actions).append(action)
        return actions

    @property
    def answered(self) -> bool:
        return self.reader.end is not None

    def dispatched(self, epoch: int = WORKER_EPOCH, attempt: int = 1) -> list[Action]:
        return self.owner.on_record(Dispatched(RID, attempt, EPOCH, 0, epoch, "simulated"), self.time)

    def tokens(self, position: int, ids: bytes, epoch: int = WORKER_EPOCH, attempt: int = 1) -> list[Action]:
        chunk = TokenChunk(RID, attempt, position, list(ids))
        return self.owner.on_tokens(Tokens.of(0, epoch, [chunk]), self.time, 0.0)

    def complete(
        self, count: int, reason: str = "stop", epoch: int = WORKER_EPOCH, attempt: int = 1
    ) -> list[Action]:
        record = Completion(RID, attempt, 0, epoch, 3, 1, count, reason, message="oh")
        return self.owner.on_record(record, self.time)

    def worker_says(self, canary: str, epoch: int = WORKER_EPOCH) -> None:
        status = replace(worker_status("simulated"), canary=canary)
        self.view.on_heartbeat(Heartbeat("worker", 0, epoch, b"", worker=status), self.time)
        self.worker = status

    def read_back(self, actions: list[Action]) -> list[Action]:
        (reply,) = (action for action in actions if isinstance(action, Reply))
        return self.owner.on_record(reply.record, self.time)


def failure(actions: list[Action]) -> Failed:
    (reply,) = (action for action in actions if isinstance(action, Reply))
    assert isinstance(reply.record, Failed)
    return reply.record


def retry(actions: list[Action]) -> Retry:
    (reply,) = (action for action in actions if isinstance(action, Reply))
    assert isinstance(reply.record, Retry)
    return reply.record


def bill(actions: list[Action]) -> Usage:
    (row,) = (action for action in actions if isinstance(action, Bill))
    return row.record


def test_online_requests_of_class_batch_reply_beside_the_coordinators() -> None:
    assert [reply_partition(2, c) for c in range(3)] == [6, 7, 7]
    assert reply_partitions(2) == (6, 7)
    assert all(topics.priority_of(p) < 2 for p in reply_partitions(2))


def test_a_normal_end() -> None:
    desk = Desk()
    assert desk.dispatched() + desk.tokens(0, b"ab") + desk.complete(2) == []
    assert desk.reader.token_ids == [97, 98]
    assert isinstance(desk.reader.end, Completion)
    assert desk.owner.open == {}


def test_doubled_and_overlapping_tokens_reach_the_client_once() -> None:
    desk = Desk()
    for position, ids in ((0, b"ab"), (0, b"ab"), (1, b"bc"), (3, b"d")):
        assert desk.tokens(position, ids) == []
    assert bytes(desk.reader.token_ids) == b"abcd"


@pytest.mark.parametrize("why", ["left", "superseded", "silent"])
def test_a_lost_worker_is_followed_by_another_attempt_once_that_is_read_back(why: str) -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.pass_ms(300)
    if why == "left":
        desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "signal 9"), 90)
    elif why == "superseded":
        desk.view.on_heartbeat(Heartbeat("worker", 0, WORKER_EPOCH + 1, b""), desk.time)
    else:
        desk.silent.add("worker")
    actions = desk.pass_ms(1_500)
    assert (retry(actions).attempt, retry(actions).owner_epoch) == (2, EPOCH)
    assert len(actions) == 1  # nothing is done before the log has it
    assert desk.pass_ms(1_000) == []
    assert desk.owned.request.attempt == 1
    cancel, sent = desk.read_back(actions)
    assert isinstance(cancel, Cancel)
    assert (cancel.record.reason, cancel.record.attempt) == ("worker_lost", 1)
    assert not cancel.behind_request
    assert sent == SendRequest(desk.owned)
    request = desk.owned.request
    assert (request.attempt, bytes(request.output_token_ids)) == (2, b"ab")
    assert request.lost_epochs == [WORKER_EPOCH]
    assert not desk.answered
    # The lost run wakes up: what it says is not counted, and it is stopped.
    (stray,) = desk.tokens(2, b"zz")
    assert isinstance(stray, Cancel)
    assert (stray.record.attempt, stray.record.epoch) == (1, WORKER_EPOCH)
    # The next attempt goes on where that one stopped.
    chunk = TokenChunk(RID, 2, 2, list(b"cd"))
    assert desk.owner.on_tokens(Tokens.of(1, 70, [chunk]), desk.time, 0.0) == []
    end = Completion(RID, 2, 1, 70, 3, 0, 4, "length")
    row = bill(desk.owner.on_record(end, desk.time))  # a stray was seen: its row may be above the truth
    assert (row.attempt, row.output_tokens, row.sealed) == (2, 4, True)
    assert bytes(desk.reader.token_ids) == b"abcd"
    assert desk.reader.end is end


def test_an_attempt_on_the_run_of_the_last_one_is_not_cancelled_for_what_that_one_still_says() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"a")
    desk.read_back(desk.complete(1, "cancelled"))
    desk.owner.on_record(Dispatched(RID, 2, EPOCH, 0, WORKER_EPOCH, "simulated"), desk.time)
    (cancel,) = desk.tokens(1, b"b")
    assert isinstance(cancel, Cancel)
    assert cancel.record.attempt == 1


def test_the_fourth_attempt_is_the_last() -> None:
    desk = Desk()
    for attempt in (1, 2, 3, 4):
        desk.owner.on_record(
            Dispatched(RID, attempt, EPOCH, 0, WORKER_EPOCH + attempt, "simulated"), desk.time
        )
        chunk = TokenChunk(RID, attempt, attempt - 1, [attempt])
        desk.owner.on_tokens(Tokens.of(0, WORKER_EPOCH + attempt, [chunk]), desk.time, 0.0)
        desk.view.on_heartbeat(Heartbeat("worker", 0, WORKER_EPOCH + attempt + 1, b""), desk.time)
        actions = desk.owner.tick(desk.view, NOW, 0.0)
        if attempt < 4:
            assert retry(actions).attempt == attempt + 1
            assert desk.read_back(actions)[1:] == [SendRequest(desk.owned)]
    assert failure(actions).code == "worker_lost"
    assert not desk.answered
    usage = bill(desk.read_back(actions))
    assert (usage.sealed, usage.attempt, usage.output_tokens, usage.input_tokens) == (True, 4, 4, 3)
    assert usage.finish_reason == "error"
    assert isinstance(desk.reader.end, ApiError)
    assert (desk.reader.end.status, desk.reader.end.code) == (502, "worker_lost")


def test_what_a_worker_that_computes_wrong_has_told_is_not_built_on() -> None:
    for told in (b"", b"ab"):
        desk = Desk()
        desk.dispatched()
        desk.tokens(0, told)
        desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "canary_failed"), 90)
        actions = desk.pass_ms(300)
        if told:
            assert failure(actions).code == "engine_fault"
            usage = bill(desk.read_back(actions))
            assert (usage.sealed, usage.input_tokens, usage.output_tokens) == (True, 0, 0)
            assert isinstance(desk.reader.end, ApiError)
            assert (desk.reader.end.status, desk.reader.end.code) == (502, "engine_fault")
        else:
            assert retry(actions).attempt == 2


def test_what_a_worker_itself_disowns_is_not_built_on() -> None:
    """It went on from KV that another had computed wrong."""
    for told in (b"", b"ab"):
        desk = Desk()
        desk.dispatched()
        desk.tokens(0, told)
        actions = desk.complete(len(told), "engine_fault")
        if told:
            assert failure(actions).code == "engine_fault"
            usage = bill(desk.read_back(actions))
            assert (usage.sealed, usage.input_tokens, usage.output_tokens) == (True, 0, 0)
            assert isinstance(desk.reader.end, ApiError)
            assert (desk.reader.end.status, desk.reader.end.code) == (502, "engine_fault")
        else:
            assert retry(actions).attempt == 2
            assert desk.read_back(actions)[-1] == SendRequest(desk.owned)


def test_what_a_healthy_worker_told_outlives_one_that_computes_wrong() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.read_back(desk.complete(2, "cancelled"))
    desk.dispatched(WORKER_EPOCH + 1, attempt=2)
    desk.worker_says("failed", WORKER_EPOCH + 1)
    assert retry(desk.owner.tick(desk.view, NOW, 0.0)).reason == "engine_fault"


def test_a_step_that_lasts_a_little_too_long_is_forgiven_and_one_that_does_not_end_is_not() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.pass_ms(100)
    for canary in ("engine_stalled", "ok", "engine_stalled"):
        desk.worker_says(canary)
        assert desk.pass_ms(STALLED_MS) == []
    actions = desk.pass_ms(100)
    assert retry(actions).reason == "engine_stalled"
    cancel, _ = desk.read_back(actions)
    assert isinstance(cancel, Cancel)
    assert (cancel.record.reason, cancel.record.attempt) == ("engine_stalled", 1)
    # It gets over it: what it says then is a stray's.
    desk.worker_says("ok")
    (stray,) = desk.tokens(2, b"zz")
    assert isinstance(stray, Cancel)
    assert (stray.record.reason, stray.record.epoch) == ("stray", WORKER_EPOCH)
    assert bytes(desk.owned.request.output_token_ids) == b"ab"


@pytest.mark.parametrize("others", [[], [2]])
def test_requests_that_workers_die_of_are_kept_apart_where_there_is_another_worker(others: list[int]) -> None:
    desk = Desk()
    ids = [RID, bytes(16)]
    desk.owner.accept(inference_request(ids[1]), desk.reader)
    live = [WORKER_EPOCH + 9, *others]
    for slot, epoch in enumerate(live):
        beat = Heartbeat("worker", slot, epoch, b"", worker=worker_status("simulated"))
        desk.view.on_heartbeat(beat, desk.time)
    desk.owner.tick(desk.view, NOW, 0.0)
    for request_id in ids:
        for attempt in (1, 2):
            lost = Dispatched(request_id, attempt, EPOCH, 0, WORKER_EPOCH + attempt, "simulated")
            desk.owner.on_record(lost, desk.time)
            if attempt == 1:
                desk.owner.on_record(Retry(request_id, 2, EPOCH, "worker_lost"), desk.time)
    first, second = (desk.owner.open[request_id] for request_id in ids)
    desk.owner.on_record(Retry(ids[0], 3, EPOCH, "worker_lost"), desk.time)
    assert first.request.excluded_slots == []  # the other has lost one run only
    desk.owner.on_record(Dispatched(ids[0], 3, EPOCH, 0, live[0], "simulated"), desk.time)
    desk.owner.on_record(Retry(ids[1], 3, EPOCH, "worker_lost"), desk.time)
    assert second.request.excluded_slots == ([0] if others else [])


def test_a_retry_that_is_refused_ends_the_request_with_its_bill() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "signal 9"), 90)
    desk.read_back(desk.pass_ms(300))
    usage = bill(desk.owner.on_record(Rejected(RID, 2, 503, "no_worker", "none"), desk.time))
    assert (usage.sealed, usage.attempt, usage.output_tokens, usage.input_tokens) == (True, 2, 2, 3)
    assert isinstance(desk.reader.end, ApiError)
    assert desk.reader.end.code == "no_worker"


@pytest.mark.parametrize("completed", [False, True])
def test_a_client_that_leaves_while_another_attempt_is_to_begin_ends_the_request(completed: bool) -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "signal 9"), 90)
    actions = desk.pass_ms(300)
    assert len(desk.owner.abandon(desk.owned, "disconnected")) == 1
    if completed:
        assert desk.complete(2, "cancelled") == []
    actions = desk.read_back(actions)
    assert failure(actions).code == "cancelled"
    usage = bill(desk.read_back(actions))
    assert (usage.finish_reason, usage.output_tokens, usage.input_tokens) == ("cancelled", 2, 3)
    assert desk.owner.open == {}


def test_a_completion_that_came_first_wins() -> None:
    desk = Desk()
    desk.dispatched()
    desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "signal 9"), 90)
    actions = desk.pass_ms(200)
    assert desk.complete(0, "length") == []
    assert desk.read_back(actions) == []
    assert isinstance(desk.reader.end, Completion)


def test_a_run_without_a_sign_for_three_seconds_is_lost() -> None:
    desk = Desk()
    desk.dispatched()
    for _ in range(5):
        assert desk.pass_ms(2_500) == []
        desk.tokens(0, b"")  # workers name live sequences
    assert retry(desk.pass_ms(3_200)).reason == "worker_lost"


def test_nobody_is_accused_while_the_own_heartbeat_does_not_come_back() -> None:
    desk = Desk()
    desk.dispatched()
    desk.pass_ms(300)
    desk.silent |= {"gateway", "worker"}
    assert desk.pass_ms(10_000) == []


def test_an_engine_that_fails_a_request_ends_it() -> None:
    desk = Desk()
    desk.dispatched()
    actions = desk.complete(0, "error")
    assert not desk.answered
    assert failure(actions).code == "engine_error"
    assert bill(desk.read_back(actions)).sealed
    assert isinstance(desk.reader.end, ApiError)
    assert desk.reader.end.status == 500


def test_a_cancel_that_nobody_asked_for_is_followed_by_another_attempt() -> None:
    desk = Desk()
    desk.dispatched()
    actions = desk.complete(0, "cancelled")
    assert retry(actions).reason == "worker_cancelled"
    assert desk.read_back(actions)[1:] == [SendRequest(desk.owned)]


def test_a_gap_is_followed_by_another_attempt() -> None:
    desk = Desk()
    desk.tokens(0, b"a")
    actions = desk.tokens(2, b"c")
    assert retry(actions).reason == "output_gap"
    assert desk.tokens(3, b"d") == []
    desk.read_back(actions)
    assert bytes(desk.owned.request.output_token_ids) == b"a"


def test_a_stray_is_cancelled_by_run_but_not_for_each_of_its_records() -> None:
    desk = Desk()
    desk.dispatched()
    (cancel,) = desk.tokens(0, b"x", epoch=99)
    assert isinstance(cancel, Cancel)
    assert (cancel.record.slot, cancel.record.epoch, cancel.behind_request) == (0, 99, False)
    assert desk.tokens(1, b"y", epoch=99) == []
    desk.pass_ms(1_100)
    assert len(desk.tokens(2, b"z", epoch=99)) == 1
    assert bill(desk.complete(0)).sealed  # the stray's own row may be above the truth


def test_an_ended_request_that_still_shows_records_is_cancelled_again() -> None:
    desk = Desk()
    desk.owner.on_record(Rejected(RID, 1, 503, "expired", "late"), 0)
    actions = desk.tokens(0, b"x")
    (cancel,) = (action for action in actions if isinstance(action, Cancel))
    assert cancel.record.epoch == WORKER_EPOCH
    row = bill(actions)  # it was refused: what ran nevertheless costs nothing
    assert (row.sealed, row.input_tokens, row.output_tokens) == (True, 0, 0)
    desk.pass_ms(61_000)
    assert desk.tokens(1, b"x") == []


@pytest.mark.parametrize("first", ["tokens", "dispatched"])
def test_a_second_run_that_shows_only_behind_the_end_changes_nothing_of_the_bill(first: str) -> None:
    desk = Desk()
    prompt = len(desk.owned.request.prompt_token_ids)
    desk.tokens(0, b"ab")
    assert desk.complete(2) == []  # the row of its worker is the truth
    ended, desk.time = desk.time, desk.time + 5_000
    actions = desk.tokens(0, b"abcd", epoch=99) if first == "tokens" else desk.dispatched(epoch=99)
    (cancel,) = (action for action in actions if isinstance(action, Cancel))
    assert (cancel.record.reason, cancel.record.epoch) == ("stray", 99)
    row = bill(actions)
    assert (row.sealed, row.attempt, row.epoch) == (True, 1, WORKER_EPOCH)
    assert (row.input_tokens, row.output_tokens, row.finish_reason) == (prompt, 2, "stop")
    assert row.ended_at == ended
    assert version(row) > version(replace(row, sealed=False, output_tokens=4, epoch=99))
    desk.pass_ms(1_100)
    assert [type(action) for action in desk.tokens(4, b"e", epoch=99)] == [Cancel]  # once is enough


def test_what_is_waived_behind_its_sealed_bill_is_free_all_the_same() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"x", epoch=99)
    desk.tokens(0, b"ab")
    sealed = bill(desk.complete(2))
    assert (sealed.sealed, sealed.output_tokens) == (True, 2)
    waived = bill(desk.owner.waive(desk.owned, "token_rate_exceeded", desk.time))
    assert (waived.sealed, waived.input_tokens, waived.output_tokens) == (True, 0, 0)
    assert version(waived) > version(sealed)
    assert [type(action) for action in desk.tokens(1, b"y", epoch=98)] == [Cancel]  # and stays so


def test_an_attempt_too_large_for_the_log_ends_the_request_with_what_it_has() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.owner.on_record(Retry(RID, 2, EPOCH, "worker_lost"), desk.time)
    desk.owned.oversized = True
    said = desk.pass_ms(100)
    assert failure(said).code == "request_too_large"
    row = bill(desk.read_back(said))
    assert (row.sealed, row.attempt, row.output_tokens) == (True, 2, 2)
    assert isinstance(desk.reader.end, ApiError)
    assert (desk.reader.end.status, desk.reader.end.code) == (413, "request_too_large")


def test_a_late_run_of_an_earlier_attempt_ranks_below_and_needs_no_row() -> None:
    desk = Desk()
    desk.tokens(0, b"a")
    desk.owner.on_record(Retry(RID, 2, EPOCH, "worker_lost"), desk.time)
    desk.tokens(1, b"b", epoch=99, attempt=2)
    assert desk.complete(2, epoch=99, attempt=2) == []
    assert [type(action) for action in desk.tokens(1, b"z")] == [Cancel]


def test_late_records_of_the_run_that_completed_are_nothing() -> None:
    desk = Desk()
    desk.dispatched()
    desk.complete(0)
    assert desk.tokens(0, b"") == []


def test_an_abandoned_request_is_cancelled_once_and_folded_to_its_end() -> None:
    desk = Desk()
    (cancel,) = desk.owner.abandon(desk.owned, "disconnected")
    assert isinstance(cancel, Cancel)
    assert cancel.behind_request
    assert desk.owner.abandon(desk.owned, "disconnected") == []
    desk.tokens(0, b"ab")
    assert desk.owned.state.token_ids == [97, 98]
    assert desk.complete(2, "cancelled") == []
    assert desk.owner.open == {}


def test_a_cancel_before_any_run_bills_nothing() -> None:
    desk = Desk()
    desk.owner.abandon(desk.owned, "disconnected")
    usage = bill(desk.owner.on_record(Rejected(RID, 1, 499, "cancelled", ""), 5_000))
    assert (usage.input_tokens, usage.output_tokens, usage.finish_reason, usage.ended_at) == (
        0,
        0,
        "cancelled",
        5_000,
    )


def test_a_cancel_without_an_end_is_sealed_after_its_time() -> None:
    desk = Desk()
    desk.pass_ms(100)
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.owner.abandon(desk.owned, "disconnected")
    for i in range(29):
        assert desk.pass_ms(1_000) == []
        desk.tokens(2 + i, b"c")
    actions = desk.pass_ms(1_000)
    assert failure(actions).code == "cancelled"
    usage = bill(desk.read_back(actions))
    assert (usage.output_tokens, usage.finish_reason, usage.sealed) == (31, "cancelled", True)


def test_the_end_of_a_request_by_time() -> None:
    desk = Desk()
    late = desk.owned.request.accepted_at + desk.owned.request.end_ms
    assert desk.owner.tick(desk.view, late - 1, 0.0) == []
    (cancel,) = desk.owner.tick(desk.view, late, 0.0)
    assert isinstance(cancel, Cancel)
    assert cancel.record.reason == "deadline_exceeded"
    assert desk.owner.tick(desk.view, late + 1_999, 0.0) == []
    assert not desk.answered  # it may end by itself before the cancel is read
    desk.owner.tick(desk.view, late + 2_000, 0.0)
    assert isinstance(desk.reader.end, ApiError)
    assert desk.reader.end.status == 504


@pytest.mark.parametrize("runs", [True, False])
def test_the_log_says_what_its_client_hears_of_a_request_that_was_late(runs: bool) -> None:
    desk = Desk()
    ends: list[tuple[str | None, str]] = []
    desk.owner.on_over = lambda owned: ends.append((owned.cancelled, type(owned.state.end).__name__))
    if runs:
        desk.dispatched()
        desk.tokens(0, b"ab")
    desk.owner.tick(desk.view, desk.owned.request.accepted_at + desk.owned.request.end_ms, 0.0)
    desk.owned.stream_id = "one that is read"
    fold = OwnStreams(desk.owner, {3: 0}).fold(RID, "acme", 3, 0, 0.0)
    assert fold is not None
    if runs:
        fold.on_record(Completion(RID, 1, 0, WORKER_EPOCH, 3, 1, 2, "cancelled"), desk.time)
        assert not fold.over
        failed = failure(actions := desk.complete(2, "cancelled"))
        assert (failed.code, failed.message) == ("deadline_exceeded", "not finished within 600 s")
        fold.on_record(failed, desk.time)
        usage = bill(desk.read_back(actions))
    else:
        word = Rejected(RID, 1, 499, "deadline_exceeded", "deadline_exceeded")
        fold.on_record(word, desk.time)
        usage = bill(desk.owner.on_record(word, desk.time))
    assert fold.over
    assert fold.state.end == desk.owned.state.end
    assert isinstance(desk.reader.end, ApiError)
    assert (desk.reader.end.status, desk.reader.end.code) == (504, "deadline_exceeded")
    used = (2, 3) if runs else (0, 0)
    assert (usage.output_tokens, usage.input_tokens, usage.finish_reason) == (*used, "error")
    assert ends == [("deadline_exceeded", "Failed" if runs else "Rejected")]


def test_an_end_that_was_quicker_than_the_time_is_the_end() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"ab")
    desk.owner.tick(desk.view, desk.owned.request.accepted_at + desk.owned.request.end_ms, 0.0)
    assert desk.complete(2, "length") == []
    assert isinstance(desk.reader.end, Completion)


def test_a_failed_behind_the_completion_that_ended_it_ends_nothing_twice() -> None:
    desk = Desk()
    desk.dispatched()
    desk.tokens(0, b"a")
    desk.view.on_event(Left("worker", 0, WORKER_EPOCH, "canary_failed"), 90)
    failed = failure(desk.pass_ms(300))
    desk.owner.abandon(desk.owned, "disconnected")
    assert desk.complete(1, "cancelled") == []
    assert RID not in desk.owner.open
    assert desk.owner.on_record(failed, desk.time) == []


@pytest.mark.parametrize(
    ("takeover", "read", "admitted", "since_read", "again"),
    [
        (0, 0, None, 0, False),
        (100, 100, None, 0, False),  # begins at the request
        (101, 101, None, 0, True),  # skipped it
        (101, 101, 100, 0, True),  # the queue that had it is gone
        (0, 101, None, 999, False),
        (0, 101, None, 1_000, True),
        (0, 100, None, 5_000, False),  # not read yet
        (0, 101, 100, 5_000, False),  # it waits in the queue
        (0, 101, 40, 5_000, True),  # that answer was to an earlier send
    ],
)
def test_send_again(takeover: int, read: int, admitted: int | None, since_read: int, again: bool) -> None:
    status = PartitionStatus(0, takeover, read, [])
    assert should_send_again(100, admitted, status, since_read) is again


def test_sent_again_three_times_then_no_answer() -> None:
    desk = Desk()
    offset = 100
    for _ in range(3):
        desk.status = PartitionStatus(desk.owned.partition, 0, offset + 1, [])
        assert desk.pass_ms(1_100) == [SendRequest(desk.owned)]
        assert desk.pass_ms(2_000) == []  # not acked yet
        offset += 1
        desk.owner.on_sent(desk.owned, offset)
    desk.status = PartitionStatus(desk.owned.partition, 0, offset + 1, [])
    actions = desk.pass_ms(1_100)
    assert failure(actions).code == "no_answer"
    assert bill(desk.read_back(actions)).input_tokens == 0
    assert isinstance(desk.reader.end, ApiError)
    assert desk.reader.end.status == 503


def test_what_was_answered_is_not_sent_again() -> None:
    desk = Desk()
    desk.status = PartitionStatus(desk.owned.partition, 0, 101, [])
    desk.owner.on_record(Admitted(RID, 1, EPOCH, desk.owned.partition, 100), desk.time)
    assert desk.pass_ms(5_000) == []
    desk.dispatched()
    desk.status = PartitionStatus(desk.owned.partition, 200, 200, [])
    assert desk.pass_ms(2_000) == []


_STEPS = st.sampled_from(
    [
        "dispatch",
        "tokens",
        "gap",
        "stray",
        "complete",
        "error",
        "cancelled",
        "late tokens",
        "reject",
        "left",
        "abandon",
        "read_back",
        "time",
    ]
)


@given(st.lists(_STEPS, max_size=18))
def test_whatever_happens_the_client_hears_one_end_and_the_bill_is_the_fold(steps: list[str]) -> None:
    desk = Desk()
    said: list[Failed | Retry] = []
    unread: deque[Failed | Retry] = deque()
    bills: list[Usage] = []
    delivered_at_end: int | None = None
    abandoned = False
    for step in [*steps, "left", "time", "read_back", "read_back", "late", "read_back", "read_back"]:
        before = desk.reader.end
        state = desk.owned.state
        over = desk.owned.counted
        count, attempt = len(state.token_ids) if over is None else over[1], state.attempt
        epoch = WORKER_EPOCH + attempt - 1  # another life for each attempt
        match step:
            case "dispatch":
                actions = desk.dispatched(epoch, attempt)
            case "tokens":
                actions = desk.tokens(count, b"ab", epoch, attempt)
            case "gap":
                actions = desk.tokens(count + 3, b"ab", epoch, attempt)
            case "late tokens" if attempt > 1:
                actions = desk.tokens(count, b"zz", epoch - 1, attempt - 1)
            case "stray":
                actions = desk.tokens(0, b"zz", 99, attempt)
            case "complete":
                actions = desk.complete(count, "length", epoch, attempt)
            case "error" | "cancelled":
                actions = desk.complete(count, step, epoch, attempt)
            case "reject":
                actions = desk.owner.on_record(Rejected(RID, attempt, 429, "limit", ""), desk.time)
            case "left":
                desk.view.on_event(Left("worker", 0, epoch, "signal 9"), 90)
                actions = []
            case "abandon":
                actions = desk.owner.abandon(desk.owned, "disconnected")
                abandoned = True
            case "late":  # nothing ever answers: the client's time is over, then the cancel's
                past_end = desk.owned.request.accepted_at + desk.owned.request.end_ms
                actions = desk.owner.tick(desk.view, past_end, 0.0) + desk.pass_ms(31_000)
            case "read_back" if unread:
                actions = desk.owner.on_record(unread.popleft(), desk.time)
            case "time":
                actions = desk.pass_ms(300)
            case _:
                continue
        replies = [a.record for a in actions if isinstance(a, Reply)]
        said += replies
        unread += replies
        rows = [a.record for a in actions if isinstance(a, Bill)]
        bills += rows
        assert all(row.output_tokens == count for row in rows)
        if any(isinstance(a, SendRequest | Bill) for a in actions):
            # What shows only behind the end makes a worker's row doubtful.
            late = over is not None and step in ("dispatch", "tokens", "gap", "stray")
            assert late or step in ("read_back", "complete", "error", "cancelled", "reject", "late")
        if before is not None:
            assert desk.reader.end is before
        elif desk.reader.end is not None:
            delivered_at_end = len(desk.reader.token_ids)
    assert desk.owner.open == {}
    assert [type(record) for record in said].count(Failed) <= 1
    assert [record.attempt for record in said if isinstance(record, Retry)] in ([], [2], [2, 3], [2, 3, 4])
    assert len(bills) <= 1
    assert abandoned or desk.reader.end is not None
    if delivered_at_end is not None:
        assert len(desk.reader.token_ids) == delivered_at_end
