"""What admission says of records that were for an earlier holder of the partition to serve."""

import pytest

from schemas.codec import encode
from schemas.records import Admitted, Cancellation, Duplicate, Idempotency, InferenceRequest
from schemas.stream_state import LATE_ADMITTED_MS
from streams.admission.actions import NoteKey, Reply
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.idempotency import keyed
from streams.admission.intake import Intake
from streams.admission.metrics import Metrics
from streams.admission.restating import ANNOUNCE_WAIT_MS
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import make_request, make_tenant

T0 = 1_700_000_000_000
TAKEOVER = 7
KEY = b"k" * 16


async def nothing() -> None:
    pass


class Desk:
    """A process that took partition 3 over."""

    def __init__(self) -> None:
        self.admission = Admission(WaitingPolicy(), DecisionLog())
        self.admission.on_assigned({3: TAKEOVER}, T0)
        self.intake = Intake(self.admission, Metrics(), lambda: T0, nothing, nothing)

    async def said_of(
        self, record: InferenceRequest | Cancellation, offset: int = TAKEOVER - 1
    ) -> list[object]:
        actions = await self.intake.on_record(3, offset, None, encode(record), [])
        return [action.record for action in actions if isinstance(action, Reply)]


async def test_where_a_request_lies_is_said_for_those_who_come_after_its_owner() -> None:
    request = make_request(accepted_at=T0 - LATE_ADMITTED_MS + 1, owner_epoch=70)
    place = Admitted(request.request_id, 1, 70, 3, TAKEOVER - 1)
    assert await Desk().said_of(request) == [place]


async def test_nothing_is_said_of_what_its_owner_may_have_forgotten_or_others_know() -> None:
    desk = Desk()
    assert await desk.said_of(make_request(accepted_at=T0 - LATE_ADMITTED_MS)) == []
    assert await desk.said_of(make_request(accepted_at=T0, attempt=2)) == []
    assert await desk.said_of(Cancellation(bytes(16), 1, "demo", "cancelled")) == []
    assert await desk.intake.on_record(3, 0, None, b"no record", []) == []
    # Another process has it now, and says so itself.
    desk.admission.takeover.heard(3, TAKEOVER + 5)
    assert await desk.said_of(make_request(accepted_at=T0)) == []


@pytest.mark.parametrize("skipped", [True, False])
async def test_a_key_that_was_freed_before_the_takeover_is_free(skipped: bool) -> None:
    first, second = (make_request(accepted_at=T0, idempotency=Idempotency(KEY, KEY, name)) for name in "ab")
    freed = Cancellation(first.request_id, 1, "demo", "queue_full", waived=True, key=KEY)
    desk = Desk()
    desk.admission.on_tenant("demo", make_tenant(), T0)
    if skipped:
        await desk.intake.on_record(3, TAKEOVER - 1, None, encode(freed), [])
    await desk.intake.on_record(3, TAKEOVER, None, encode(second), [])
    # The holder before has noted whose the key was, and nothing since.
    desk.admission.keys.load(3, [keyed(first)])
    desk.admission.keys.loaded(3)
    desk.admission.restating.usage_is_read(3)
    desk.admission.restating.open_due(desk.admission.fleet, T0 + ANNOUNCE_WAIT_MS)
    actions = desk.intake.look_again(3)
    told = [action.record for action in actions if isinstance(action, Reply)]
    notes = [action.keyed for action in actions if isinstance(action, NoteKey)]
    if skipped:
        assert [(note.request_id, note.freed) for note in notes] == [(first.request_id, True)]
        assert [type(record) for record in told] == [Admitted]
    else:
        assert (notes, [type(record) for record in told]) == ([], [Duplicate])


async def test_one_that_waits_for_restatements_can_be_found_too() -> None:
    request = make_request(accepted_at=T0)
    assert await Desk().said_of(request, TAKEOVER) == [Admitted(request.request_id, 1, 1, 3, TAKEOVER)]
