"""Of all requests with one Idempotency-Key one runs, whoever holds the partition."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import encode
from schemas.fleet import FleetView
from schemas.records import (
    Admitted,
    Cancellation,
    Duplicate,
    Heartbeat,
    Idempotency,
    InferenceRequest,
    KeyedRequest,
    Rejected,
)
from streams.admission.actions import Action, Assign, NoteKey, Reply
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.idempotency import KEEP_MS, IdempotencyKeys, keyed
from streams.admission.intake import Intake
from streams.admission.metrics import Metrics
from streams.admission.restating import ANNOUNCE_WAIT_MS
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import make_request, make_status, make_tenant

T0 = 1_700_000_000_000
KEY, OTHER_KEY, BODY = b"k" * 16, b"o" * 16, b"b" * 16


def request(
    key: bytes = KEY, body: bytes = BODY, public_id: str = "first", **fields: Any
) -> InferenceRequest:
    return make_request(idempotency=Idempotency(key, body, public_id), accepted_at=T0, **fields)


def admission(*, with_worker: bool = True) -> Admission:
    found = Admission(WaitingPolicy(), DecisionLog())
    found.on_assigned({0: 0}, T0)
    found.on_tenant("demo", make_tenant(), T0)
    if with_worker:
        add_worker(found)
    return found


def add_worker(target: Admission) -> list[Action]:
    target.fleet.on_heartbeat(Heartbeat("worker", 0, 10, b"", worker=make_status()), 100)
    assert isinstance(target.fleet, FleetView)
    return target.fleet_changed(T0)


def send(target: Admission, asked: InferenceRequest, now: int = T0) -> list[Action]:
    return target.on_request(asked, encode(asked), 0, 5, None, now)


def answers(actions: list[Action]) -> list[Any]:
    return [action.record for action in actions if isinstance(action, Reply)]


def test_the_second_is_told_where_the_first_is_read() -> None:
    target = admission()
    first = request()
    (assign,) = send(target, first)
    assert isinstance(assign, Assign)
    assert assign.keyed == KeyedRequest(first.request_id, KEY, BODY, "first", T0)
    second = request(public_id="second")
    assert answers(send(target, second)) == [Duplicate(second.request_id, "first", T0)]
    (other,) = send(target, request(OTHER_KEY))
    assert isinstance(other, Assign)


def test_another_body_is_refused_and_leaves_the_first_alone() -> None:
    target = admission()
    send(target, request())
    (refusal,) = answers(send(target, request(body=b"x" * 16)))
    assert isinstance(refusal, Rejected)
    assert (refusal.status, refusal.code, refusal.retry_after_ms) == (422, "idempotency_key_reused", None)
    assert isinstance(answers(send(target, request()))[0], Duplicate)


def test_a_key_whose_request_was_refused_is_free() -> None:
    target = admission(with_worker=False)
    first = request(end_ms=1_000)
    assert isinstance(answers(send(target, first))[0], Admitted)
    assert isinstance(answers(send(target, request()))[0], Duplicate)  # one that waits counts too
    (refusal,) = answers(target.tick(T0 + 1_001))
    assert (refusal.request_id, refusal.status) == (first.request_id, 503)
    assert isinstance(answers(send(target, request()))[0], Admitted)


def refused_with(first: InferenceRequest) -> Cancellation:
    """What its gateway says when another choice of the same body was refused."""
    return Cancellation(first.request_id, 1, "demo", "queue_full", waived=True, key=KEY)


def test_a_key_is_free_when_its_gateway_says_so_and_stays_free_after_a_takeover() -> None:
    target = admission()
    first = request()
    log = [assign.keyed for assign in send(target, first) if isinstance(assign, Assign)]
    assert target.on_cancel(Cancellation(first.request_id, 1, "demo", "disconnected"), 0, T0) == []
    assert isinstance(answers(send(target, request()))[0], Duplicate)  # a client that left frees nothing
    (note,) = target.on_cancel(refused_with(first), 0, T0)
    assert isinstance(note, NoteKey)
    log.append(note.keyed)
    second = request(public_id="second")
    log += [assign.keyed for assign in send(target, second) if isinstance(assign, Assign)]
    assert target.on_cancel(refused_with(first), 0, T0) == []  # said once more: the key is another's now
    for count, first_public_id in ((1, "first"), (2, None), (3, "second")):
        heir = admission()
        heir.keys.load(0, [record for record in log[:count] if record is not None])
        (answer,) = send(heir, request(public_id="third"))
        if first_public_id is None:
            assert isinstance(answer, Assign)
        else:
            assert answers([answer])[0].public_id == first_public_id


def test_a_key_of_one_that_waits_needs_no_note() -> None:
    target = admission(with_worker=False)
    first = request()
    send(target, first)
    (refusal,) = answers(target.on_cancel(refused_with(first), 0, T0))
    assert (refusal.status, refusal.code) == (499, "cancelled")
    assert isinstance(answers(send(target, request()))[0], Admitted)


def test_a_key_whose_dispatch_was_lost_stays_free_after_a_takeover() -> None:
    target = admission()
    (assign,) = send(target, request())
    assert isinstance(assign, Assign)
    assert assign.keyed is not None
    note, refusal, *_ = target.on_dispatch_failed(assign, "TimeoutError", T0)
    assert isinstance(note, NoteKey)
    assert answers([refusal])[0].code == "dispatch_failed"
    heir = admission()
    heir.keys.load(0, [assign.keyed, note.keyed])
    assert isinstance(send(heir, request())[0], Assign)


async def test_a_cancel_behind_a_request_that_waits_for_the_keys_waits_too() -> None:
    async def nothing() -> None:
        pass

    target = admission()
    intake = Intake(target, Metrics(), lambda: T0, nothing, nothing)
    first = request()
    told = []
    for offset, record in enumerate((first, refused_with(first), request(public_id="second"))):
        told += await intake.on_record(0, offset, None, encode(record), [])
    # Where they lie is known, should this process and their owner die.
    assert [record.requests_offset for record in answers(told)] == [0, 2]
    target.keys.loaded(0)
    assert intake.look_again(0) == []  # what earlier holders let in is not known yet
    target.restating.usage_is_read(0)
    target.restating.open_due(target.fleet, T0 + ANNOUNCE_WAIT_MS)
    kinds = [type(action) for action in intake.look_again(0)]
    assert kinds == [Assign, NoteKey, Assign]


def test_one_that_waited_is_noted_when_it_runs() -> None:
    target = admission(with_worker=False)
    first = request()
    send(target, first)
    (assign,) = add_worker(target)
    assert isinstance(assign, Assign)
    assert assign.keyed == keyed(first)


def test_sent_again_is_not_asked_again() -> None:
    target = admission()
    first = request()
    (assign,) = send(target, first)
    assert isinstance(assign, Assign)
    target.on_dispatched(assign, 0)
    assert "Dispatched" in [type(record).__name__ for record in answers(send(target, first))]
    retry = request(attempt=2, request_id=first.request_id)
    (again,) = send(target, retry)
    assert isinstance(again, Assign)
    assert again.keyed is None


def test_a_key_lasts_as_long_as_its_answer_can_be_read() -> None:
    target = admission()
    send(target, request())
    target.tick(T0 + KEEP_MS - 1)
    assert isinstance(answers(send(target, request()))[0], Duplicate)
    target.tick(T0 + KEEP_MS)
    assert len(target.keys) == 0


def test_memory_has_a_bound() -> None:
    keys = IdempotencyKeys(most=10)
    for n in range(50):
        assert keys.check(request(bytes([n]) * 16), 0) is None
        keys.expire(T0)
    assert len(keys) == 10


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=30))
def test_whoever_holds_the_partition_only_one_runs(steps: list[tuple[int, bool, bool]]) -> None:
    """Each step: a key is asked with; the holder may die before or after it carried the actions out."""
    log: list[KeyedRequest] = []
    target = admission()
    ran: dict[bytes, set[bytes]] = {}
    waiting: list[tuple[bytes, InferenceRequest]] = []  # sent again by their owners after a takeover
    for number, dies, acted in steps:
        asked = bytes([number]) * 16, request(bytes([number]) * 16)
        to_send, waiting = [*waiting, asked], []
        for key, each in to_send:
            actions = send(target, each)
            if dies and not acted:
                waiting.append((key, each))
                continue
            for action in actions:
                if isinstance(action, Assign):
                    log += [] if action.keyed is None else [action.keyed]
                    ran.setdefault(key, set()).add(each.request_id)
        if dies:
            target = admission()
            target.keys.load(0, log)
    assert all(len(requests) == 1 for requests in ran.values())


def test_partitions_that_went_are_forgotten() -> None:
    target = admission()
    send(target, request())
    target.keys.loaded(0)
    target.on_assigned({}, T0)
    assert len(target.keys) == 0
    assert not target.keys.is_loaded(0)
