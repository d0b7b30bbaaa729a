"""The whole of admission without Kafka: records and times in, actions out."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import decode, encode
from schemas.records import (
    Admitted,
    Cancellation,
    ClassLimits,
    Dispatch,
    Dispatched,
    Heartbeat,
    InferenceRequest,
    Join,
    Left,
    PartitionStatus,
    QueuedTokens,
    Rejected,
    Usage,
)
from streams.admission.actions import Action, Assign, Reply
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.memory import REMEMBER_MS
from streams.admission.splice import encode_dispatch
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import make_request, make_status, make_tenant

T0 = 1_700_000_000_000
EPOCH = 10


class Driver:
    """Carries actions out like the process around admission, and keeps what owners would hear."""

    def __init__(self, policy: WaitingPolicy | None = None, **tenant: Any) -> None:
        self.admission = Admission(policy or WaitingPolicy(), DecisionLog())
        self.now = T0
        self.offset = 0
        self.heartbeats = 0
        self.mailbox = 0
        self.replies: list[Reply] = []
        self.dispatches: list[Assign] = []
        self.admission.on_assigned(dict.fromkeys(range(6), 0), T0)
        self.admission.on_tenant("demo", make_tenant(**tenant), T0)

    def carry_out(self, actions: list[Action]) -> list[Any]:
        """The records that this led to, in order."""
        records: list[Any] = []
        for action in actions:
            if isinstance(action, Reply):
                self.replies.append(action)
                records.append(action.record)
            elif isinstance(action, Assign):
                self.dispatches.append(action)
                records.append(action.dispatch)
                records += self.carry_out(self.admission.on_dispatched(action, self.mailbox))
                self.mailbox += 1
        return records

    def request(self, **fields: Any) -> InferenceRequest:
        return make_request(accepted_at=self.now, **fields)

    def send(self, request: InferenceRequest) -> list[type]:
        """The kinds of records that the request leads to at once."""
        self.offset += 1
        partition = request.priority
        assert self.admission.takeover.accept(partition, self.offset)
        actions = self.admission.on_request(request, encode(request), partition, self.offset, None, self.now)
        return [type(record) for record in self.carry_out(actions)]

    def cancel(self, request: InferenceRequest, **fields: Any) -> list[Any]:
        values = {"request_id": request.request_id, "attempt": request.attempt, "tenant": "demo"}
        word = Cancellation(**{**values, "reason": "away", **fields})
        return self.carry_out(self.admission.on_cancel(word, 0, self.now))

    def heartbeat(self, slot: int = 0, epoch: int = EPOCH, **status: Any) -> list[Any]:
        self.heartbeats += 1
        heartbeat = Heartbeat("worker", slot, epoch, b"", worker=make_status(**status))
        self.admission.fleet.on_heartbeat(heartbeat, self.heartbeats * 100)
        return self.carry_out(self.admission.fleet_changed(self.now))

    def usage(self, request: InferenceRequest, output: int = 4, slot: int = 0, **fields: Any) -> list[Any]:
        record = Usage(
            request.request_id,
            request.attempt,
            False,
            request.tenant,
            request.priority,
            request.model,
            len(request.prompt_token_ids),
            0,
            output,
            fields.pop("finish_reason", "length"),
            request.accepted_at,
            self.now,
            slot,
            EPOCH,
            **fields,
        )
        return self.carry_out(self.admission.on_usage(record, self.now))

    def tick(self, ms: int = 0) -> list[Any]:
        self.now += ms
        return self.carry_out(self.admission.tick(self.now))

    def rejections(self) -> list[Rejected]:
        return [reply.record for reply in self.replies if isinstance(reply.record, Rejected)]

    def refusal(self) -> tuple[int, str]:
        last = self.rejections()[-1]
        return last.status, last.code


DISPATCHED = [Dispatch, Dispatched]


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.heartbeat()
    return driver


def full(driver: Driver) -> None:
    driver.heartbeat(max_num_seqs=1, num_running=1)


def test_a_request_goes_at_once_to_a_worker_with_room(driver: Driver) -> None:
    request = driver.request(reply_partition=4)
    assert driver.send(request) == DISPATCHED
    reply = driver.replies[-1]
    assert reply.to == (request.request_id, 1, 4)
    assert reply.record == Dispatched(
        request.request_id,
        1,
        request.owner_epoch,
        0,
        EPOCH,
        request.model,
        requests_partition=0,
        requests_offset=1,
    )
    dispatch = driver.dispatches[-1].dispatch
    assert (dispatch.slot, dispatch.epoch, dispatch.request) == (0, EPOCH, request)
    assert decode(driver.dispatches[-1].record) == request


def test_without_room_it_waits_and_says_where(driver: Driver) -> None:
    full(driver)
    request = driver.request()
    assert driver.send(request) == [Admitted]
    assert driver.replies[-1].record == Admitted(request.request_id, 1, request.owner_epoch, 0, driver.offset)
    assert driver.admission.num_queued(0) == 1
    assert [type(r) for r in driver.heartbeat()] == DISPATCHED
    assert driver.admission.num_queued(0) == 0


def test_a_usage_row_frees_the_place_at_once(driver: Driver) -> None:
    driver.heartbeat(max_num_seqs=1)
    first, second = driver.request(), driver.request()
    assert driver.send(first) == DISPATCHED
    assert driver.send(second) == [Admitted]
    assert [type(r) for r in driver.usage(first)] == DISPATCHED
    assert driver.usage(first) == []  # the same row again frees nothing
    assert driver.send(driver.request()) == [Admitted]


def test_higher_classes_go_first(driver: Driver) -> None:
    full(driver)
    low, high = driver.request(priority=2), driver.request(priority=0)
    driver.send(low)
    driver.send(high)
    driver.heartbeat(max_num_seqs=1)
    assert [a.dispatch.request for a in driver.dispatches] == [high]
    driver.usage(high)
    assert [a.dispatch.request for a in driver.dispatches] == [high, low]


def test_nothing_of_a_lower_class_passes_a_higher_one_that_waits_for_room(driver: Driver) -> None:
    driver.heartbeat(free_blocks=3)
    big = driver.request(prompt_token_ids=[1] * 100)
    assert driver.send(big) == [Admitted]
    assert driver.send(driver.request(priority=1)) == [Admitted]
    driver.heartbeat()
    assert driver.dispatches[0].dispatch.request is big


def test_limits_refuse_with_the_time_to_wait() -> None:
    driver = Driver(limits=[ClassLimits(0, tokens_per_minute=60)])
    driver.heartbeat()
    assert driver.send(driver.request()) == DISPATCHED  # 26 tokens
    assert driver.send(driver.request()) == DISPATCHED
    assert driver.send(driver.request()) == [Rejected]
    assert driver.refusal() == (429, "token_rate_exceeded")
    assert driver.rejections()[-1].retry_after_ms == 18_000
    driver.now += 18_000
    assert driver.send(driver.request()) == DISPATCHED


@pytest.mark.parametrize(
    ("tenant", "fields", "expected"),
    [
        ({}, {"tenant": "nobody"}, (403, "unknown_tenant")),
        ({"disabled": True}, {}, (403, "tenant_disabled")),
        ({"tier": 1}, {}, (403, "class_not_allowed")),
        ({}, {"max_tokens": 0}, (400, "invalid_request")),
        ({}, {"prompt_token_ids": []}, (400, "invalid_request")),
        ({}, {"attempt": 0}, (400, "invalid_request")),
        ({}, {"end_ms": 0}, (400, "invalid_request")),
        ({}, {"prompt_token_ids": [1] * 9_000}, (400, "context_length_exceeded")),
        ({"allowed_models": ["other"]}, {}, (403, "model_not_allowed")),
        ({"limits": [ClassLimits(0, max_tokens=15)]}, {}, (400, "max_tokens_too_large")),
        ({"limits": [ClassLimits(0, tokens_per_minute=25)]}, {}, (400, "tokens_per_minute_exceeded")),
    ],
)
def test_refuses(tenant: dict[str, Any], fields: dict[str, Any], expected: tuple[int, str]) -> None:
    driver = Driver(**tenant)
    driver.heartbeat()
    assert driver.send(driver.request(**fields)) == [Rejected]
    assert driver.refusal() == expected


def test_a_class_in_a_partition_of_another_is_refused(driver: Driver) -> None:
    actions = driver.admission.on_request(driver.request(priority=0), b"", 1, 0, None, T0)
    driver.carry_out(actions)
    assert driver.refusal() == (400, "invalid_request")
    assert "partition 1" in driver.rejections()[-1].message


def test_a_deleted_tenant_is_refused(driver: Driver) -> None:
    driver.admission.on_tenant("demo", None, T0)
    driver.send(driver.request())
    assert driver.refusal() == (403, "unknown_tenant")


def test_cancelled_while_it_waits_it_is_gone_and_its_reservation_too() -> None:
    driver = Driver(limits=[ClassLimits(0, tokens_per_minute=26, max_concurrent_requests=1)])
    driver.heartbeat(max_num_seqs=1, num_running=1)
    request = driver.request()
    assert driver.send(request) == [Admitted]
    assert [type(r) for r in driver.cancel(request)] == [Rejected]
    assert driver.refusal() == (499, "cancelled")
    driver.send(late := driver.request())
    driver.cancel(late, reason="deadline_exceeded")
    assert driver.refusal() == (499, "deadline_exceeded")
    assert driver.admission.limits.reserved_tokens("demo", 0) == 0
    assert driver.heartbeat() == []
    assert driver.send(driver.request()) == DISPATCHED


def test_cancels_of_what_was_dispatched_of_other_runs_and_of_earlier_attempts_do_nothing(
    driver: Driver,
) -> None:
    dispatched = driver.request()
    driver.send(dispatched)
    assert driver.cancel(dispatched) == []
    full(driver)
    retry = driver.request(attempt=2)
    assert driver.send(retry) == [Admitted]
    assert driver.cancel(retry, slot=0, epoch=3) == []
    assert driver.cancel(retry, attempt=1) == []
    assert driver.cancel(driver.request()) == []
    assert [type(r) for r in driver.heartbeat()] == DISPATCHED


def test_sent_again_while_it_waits_it_is_dropped_and_once_dispatched_the_owner_hears_it_again(
    driver: Driver,
) -> None:
    full(driver)
    request = driver.request()
    assert driver.send(request) == [Admitted]
    assert driver.send(request) == []
    driver.heartbeat()
    assert driver.send(request) == [Dispatched]
    assert len(driver.dispatches) == 1
    driver.tick(REMEMBER_MS)
    assert driver.send(driver.request(request_id=request.request_id)) == DISPATCHED


def test_sent_again_before_the_ack_it_is_dropped(driver: Driver) -> None:
    request = driver.request()
    (assign,) = driver.admission.on_request(request, b"", 0, 1, None, driver.now)
    assert isinstance(assign, Assign)
    assert driver.admission.on_request(request, b"", 0, 2, None, driver.now) == []
    assert [type(r) for r in driver.carry_out(driver.admission.on_dispatched(assign, 0))] == [Dispatched]


def test_a_higher_attempt_replaces_the_one_that_waits(driver: Driver) -> None:
    full(driver)
    first = driver.request()
    driver.send(first)
    retry = driver.request(request_id=first.request_id, attempt=2, output_token_ids=[7])
    assert driver.send(retry) == [Admitted]
    assert driver.send(first) == []
    driver.heartbeat()
    assert [a.dispatch.request.attempt for a in driver.dispatches] == [2]


def test_retries_pass_limits_and_go_to_the_head_of_their_class() -> None:
    driver = Driver(limits=[ClassLimits(0, max_concurrent_requests=1)])
    driver.heartbeat(max_num_seqs=1, num_running=1)
    first, retry = driver.request(), driver.request(attempt=2)
    assert [driver.send(first), driver.send(retry)] == [[Admitted], [Admitted]]
    driver.heartbeat(max_num_seqs=1)
    assert [a.dispatch.request for a in driver.dispatches] == [retry]


def test_excluded_slots_block_nobody_else(driver: Driver) -> None:
    retry = driver.request(attempt=2, excluded_slots=[0])
    assert driver.send(retry) == [Admitted]
    assert driver.send(driver.request()) == DISPATCHED
    assert [type(r) for r in driver.heartbeat(slot=1)] == DISPATCHED
    assert driver.dispatches[-1].dispatch.slot == 1


def test_what_waits_past_its_end_is_refused(driver: Driver) -> None:
    full(driver)
    driver.send(driver.request(end_ms=5_000))
    driver.send(driver.request(end_ms=50_000, start_ms=7_000))
    assert driver.tick(4_999) == []
    assert [type(r) for r in driver.tick(1)] == [Rejected]
    assert driver.refusal() == (503, "expired")
    assert driver.tick(1_999) == []
    assert [type(r) for r in driver.tick(1)] == [Rejected]
    assert driver.admission.num_queued(0) == 0
    assert driver.admission.limits.reserved_tokens("demo", 0) == 0


def test_what_is_late_when_it_comes_is_refused(driver: Driver) -> None:
    request = driver.request(end_ms=100)
    driver.now += 100
    assert driver.send(request) == [Rejected]
    assert driver.refusal() == (503, "expired")


def test_without_any_worker_it_waits_ten_seconds() -> None:
    driver = Driver()
    driver.tick()
    early = driver.request()
    assert driver.send(early) == [Admitted]
    driver.tick()
    driver.tick(3_000)
    late = driver.request()
    driver.send(late)
    assert [r.request_id for r in driver.tick(7_000)] == [early.request_id]
    assert driver.refusal() == (503, "no_worker")
    assert driver.rejections()[-1].retry_after_ms
    assert [type(r) for r in driver.heartbeat()] == DISPATCHED
    assert driver.dispatches[-1].dispatch.request is late


def test_the_wait_for_a_worker_begins_anew_when_one_was_there(driver: Driver) -> None:
    full(driver)
    driver.send(driver.request())
    driver.tick(60_000 - 11_000)
    driver.admission.fleet.on_event(Left("worker", 0, EPOCH, "killed"), 99)
    driver.admission.fleet_changed(driver.now)
    driver.tick()
    assert driver.tick(9_999) == []
    assert [type(r) for r in driver.tick(1)] == [Rejected]


def test_a_worker_that_is_gone_gets_nothing_and_its_counts_are_dropped(driver: Driver) -> None:
    driver.heartbeat(max_num_seqs=1)
    driver.send(driver.request())
    assert driver.send(driver.request()) == [Admitted]
    driver.admission.fleet.on_event(Left("worker", 0, EPOCH, "killed"), 98)
    assert driver.carry_out(driver.admission.fleet_changed(driver.now)) == []
    driver.admission.fleet.on_event(Join("worker", 0, b""), 99)
    assert [type(r) for r in driver.heartbeat(epoch=99, max_num_seqs=1)] == DISPATCHED
    assert driver.dispatches[-1].dispatch.epoch == 99


def test_a_request_that_no_worker_left_can_run_is_refused_and_blocks_nobody(driver: Driver) -> None:
    full(driver)
    big = driver.request(prompt_token_ids=[1] * 5_000)
    assert driver.send(big) == [Admitted]
    assert driver.send(driver.request()) == [Admitted]
    records = driver.heartbeat(num_blocks=10, free_blocks=10)
    assert [type(r) for r in records] == [Rejected, *DISPATCHED]
    assert driver.refusal() == (503, "no_worker")


def test_bounds_of_the_queue() -> None:
    driver = Driver(WaitingPolicy(max_queued_requests=2, max_queued_tokens=100))
    driver.heartbeat(max_num_seqs=1, num_running=1)
    huge = driver.request(prompt_token_ids=[1] * 500)
    assert driver.send(huge) == [Admitted]  # one alone may wait whatever its size
    assert driver.send(driver.request()) == [Rejected]
    assert driver.refusal() == (503, "queue_full")
    assert driver.rejections()[-1].retry_after_ms == 1_000
    driver.cancel(huge)
    assert [driver.send(driver.request()) for _ in range(3)] == [[Admitted], [Admitted], [Rejected]]
    assert driver.send(driver.request(priority=1)) == [Admitted]  # another class has its own bound
    assert driver.send(driver.request(attempt=2)) == [Admitted]  # a retry is in already
    assert driver.admission.limits.reserved_tokens("demo", 0) == 2 * 26


def test_a_tenants_allowance_of_waiting_tokens() -> None:
    driver = Driver(limits=[ClassLimits(2, max_enqueued_tokens=60)])
    driver.heartbeat(max_num_seqs=1)
    sent = [driver.send(driver.request(priority=2)) for _ in range(4)]
    assert sent == [DISPATCHED, [Admitted], [Admitted], [Rejected]]
    assert driver.refusal() == (429, "enqueued_tokens_exceeded")


def test_the_allowance_of_waiting_tokens_is_one_for_all_models() -> None:
    driver = Driver(limits=[ClassLimits(2, max_enqueued_tokens=60)])
    sent = [driver.send(driver.request(priority=2, model=model)) for model in ("a", "b", "c")]
    assert sent == [[Admitted], [Admitted], [Rejected]]
    assert driver.refusal() == (429, "enqueued_tokens_exceeded")


def test_a_failed_dispatch_is_refused_and_may_be_sent_again(driver: Driver) -> None:
    driver.heartbeat(max_num_seqs=1)
    request = driver.request()
    (assign,) = driver.admission.on_request(request, b"", 0, 1, None, driver.now)
    assert isinstance(assign, Assign)
    driver.carry_out(driver.admission.on_dispatch_failed(assign, "TimeoutError", driver.now))
    assert driver.refusal() == (503, "dispatch_failed")
    assert driver.admission.limits.reserved_tokens("demo", 0) == 0
    assert driver.send(request) == DISPATCHED


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_dispatch_too_large_for_its_topic_is_refused_as_one_for_good(driver: Driver, attempt: int) -> None:
    request = replace(driver.request(), attempt=attempt, output_token_ids=[7] * (attempt - 1))
    (assign,) = driver.admission.on_request(request, b"", 0, 1, None, driver.now)
    assert isinstance(assign, Assign)
    failed = driver.admission.on_dispatch_failed(assign, "too large", driver.now, too_large=True)
    driver.carry_out(failed)
    assert driver.refusal() == (413, "request_too_large")
    (reply,) = failed
    assert isinstance(reply, Reply)
    assert isinstance(reply.record, Rejected)
    assert reply.record.message.startswith("prompt: ")
    assert reply.record.retry_after_ms is None
    assert driver.admission.limits.reserved_tokens("demo", 0) == 0


def test_partitions_that_went_take_their_queue_along(driver: Driver) -> None:
    full(driver)
    gone, stays = driver.request(priority=0), driver.request(priority=1)
    driver.send(gone)
    driver.send(stays)
    statuses = {s.partition: s for s in driver.admission.partition_statuses()}
    assert statuses[0] == PartitionStatus(0, 0, 2, [QueuedTokens(gone.model, 0, 26)])
    assert statuses[1].queued == [QueuedTokens(gone.model, 1, 26)]
    driver.admission.on_assigned({1: 0}, driver.now)
    assert [s.partition for s in driver.admission.partition_statuses()] == [1]
    driver.heartbeat()
    assert [a.dispatch.request for a in driver.dispatches] == [stays]
    assert driver.admission.limits.reserved_tokens("demo", 0) == 0


def test_a_partition_that_another_process_took_is_left_to_it(driver: Driver) -> None:
    full(driver)
    driver.send(driver.request())
    assert driver.admission.on_other_admission([PartitionStatus(0, 9, 9, [])], driver.now) == [0]
    assert not driver.admission.takeover.accept(0, 10)
    assert driver.heartbeat() == []


def test_expects_what_the_tenant_got_before(driver: Driver) -> None:
    request = driver.request(max_tokens=500)
    driver.send(request)
    driver.usage(request, output=40, finish_reason="stop")
    driver.send(driver.request(max_tokens=500))
    assert 36 <= driver.dispatches[-1].dispatch.expected_output_tokens <= 44
    driver.send(driver.request(max_tokens=500, attempt=2, output_token_ids=[1] * 30))
    assert driver.dispatches[-1].dispatch.expected_output_tokens in range(6, 15)


def test_a_complete_output_whose_worker_died_before_it_said_so_is_dispatched_to_be_ended(
    driver: Driver,
) -> None:
    driver.send(driver.request(max_tokens=30, attempt=2, output_token_ids=[1] * 30))
    assert driver.dispatches[-1].dispatch.request.attempt == 2
    (refused,) = driver.send(driver.request(max_tokens=30, attempt=2, output_token_ids=[1] * 31))
    assert refused is Rejected


def test_decisions_are_logged_with_what_they_saw(driver: Driver) -> None:
    driver.send(driver.request())
    driver.send(driver.request(tenant="nobody"))
    first, second = driver.admission.decisions.drain()
    assert (first.action, first.slot, first.epoch) == ("dispatch", 0, EPOCH)
    assert first.inputs["tokens"] == 26
    assert (second.action, second.reason) == ("reject", "unknown_tenant")
    assert driver.admission.decisions.drain() == []


STEP = st.sampled_from(["send", "send", "retry", "cancel", "usage", "full", "free", "gone", "tick", "again"])


@given(st.lists(st.tuples(STEP, st.integers(0, 2), st.integers(0, 999), st.integers(0, 3_000)), max_size=60))
def test_every_request_has_one_outcome_and_nothing_leaks(steps: list[tuple[str, int, int, int]]) -> None:
    driver = Driver(WaitingPolicy(max_queued_requests=5, no_worker_wait_ms=2_000))
    driver.admission.on_tenant("demo", make_tenant(limits=[ClassLimits(0, tokens_per_minute=200)]), T0)
    sent: list[InferenceRequest] = []
    for what, priority, pick, wait in steps:
        driver.tick(wait)
        chosen = sent[pick % len(sent)] if sent else None
        if what == "send":
            sent.append(driver.request(priority=priority, end_ms=20_000))
            driver.send(sent[-1])
        elif what == "full":
            driver.heartbeat(max_num_seqs=2, num_running=2, mailbox_offsets=[driver.mailbox] * 3)
        elif what == "free":
            driver.heartbeat(max_num_seqs=2, mailbox_offsets=[driver.mailbox] * 3)
        elif what == "gone":
            driver.admission.fleet.on_event(Left("worker", 0, EPOCH, "killed"), 99)
            driver.carry_out(driver.admission.fleet_changed(driver.now))
        elif chosen is not None and what == "cancel":
            driver.cancel(chosen)
        elif chosen is not None and what == "usage":
            driver.usage(chosen)
        elif chosen is not None and what == "retry":
            sent.append(
                driver.request(
                    priority=chosen.priority, request_id=chosen.request_id, attempt=2, end_ms=20_000
                )
            )
            driver.send(sent[-1])
        elif chosen is not None:
            driver.send(chosen)
        queued = sum(driver.admission.num_queued(c) for c in range(3))
        tokens = sum(q.tokens for s in driver.admission.partition_statuses() for q in s.queued)
        assert (queued == 0) == (tokens == 0)
    # Time alone ends what is left.
    for _ in range(30):
        driver.tick(1_000)
    assert sum(driver.admission.num_queued(c) for c in range(3)) == 0
    outcomes: dict[tuple[bytes, int], int] = {}
    for assign in driver.dispatches:
        key = (assign.dispatch.request.request_id, assign.dispatch.request.attempt)
        outcomes[key] = outcomes.get(key, 0) + 1
    assert all(count == 1 for count in outcomes.values())
    answered = outcomes.keys() | {(r.request_id, r.attempt) for r in driver.rejections()}
    newest = {r.request_id: max(s.attempt for s in sent if s.request_id == r.request_id) for r in sent}
    assert {(r.request_id, newest[r.request_id]) for r in sent} <= answered
    driver.tick(700_000)
    driver.tick(700_000)
    for priority in range(3):
        assert driver.admission.limits.reserved_tokens("demo", priority) == 0
        assert driver.admission.limits.num_concurrent("demo", priority) == 0
    assert driver.admission.limits.num_remembered() == 0
    assert len(driver.admission._memory) == 0


NUMBERS = st.integers(0, 2**62)


@given(NUMBERS, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=20), st.none() | st.integers(0, 10**6))
def test_a_spliced_dispatch_has_the_bytes_of_an_encoded_one(
    slot: int, epoch: int, expected: int, prompt: list[int], start_ms: int | None
) -> None:
    request = make_request(prompt_token_ids=prompt, start_ms=start_ms, excluded_slots=[slot], detach_ms=7)
    dispatch = Dispatch(slot, epoch, expected, request)
    assert encode_dispatch(dispatch, encode(request)) == encode(dispatch)
    # Another version's bytes are not passed on under our schema's name.
    assert encode_dispatch(dispatch, b"\xc3\x01other---" + encode(request)[10:]) == encode(dispatch)


def test_all_that_owners_are_told_says_what_the_tenant_has_left() -> None:
    driver = Driver(limits=[ClassLimits(0, tokens_per_minute=60, requests_per_minute=9)])
    driver.heartbeat(max_num_seqs=1)
    kinds = [kind for _ in range(3) for kind in driver.send(driver.request()) if kind is not Dispatch]
    assert kinds == [Dispatched, Admitted, Rejected]
    left = [[(limit.name, limit.remaining) for limit in r.record.rate_limits] for r in driver.replies[-3:]]  # type: ignore[union-attr]
    assert left == [
        [("requests", 8), ("tokens", 34)],
        [("requests", 7), ("tokens", 8)],
        [("requests", 7), ("tokens", 8)],
    ]
