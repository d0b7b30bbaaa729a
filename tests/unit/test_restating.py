"""A partition of inference.requests changes hands: what owners say, and what the new holder makes of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.actions import Restated
from gateway.metrics import Timing
from gateway.owner import Owner
from gateway.reader import WholeReader
from schemas.codec import decode, encode
from schemas.fleet import FleetView
from schemas.records import (
    ClassLimits,
    Dispatched,
    Heartbeat,
    PartitionStatus,
    RateLimit,
    Restate,
    RestatedRequest,
    Tenant,
    Usage,
)
from streams.admission.limits import Limits
from streams.admission.restating import (
    ANNOUNCE_WAIT_MS,
    RESTATE_WAIT_MS,
    USAGE_WAIT_MS,
    Restating,
)
from streams.ledger.batch_actions import AdmissionOffsets
from tests.batch_world import World, dispatched, make_item
from tests.gateway_factories import EPOCH, SLOT, WORKER_EPOCH, inference_request

T0 = 1_700_000_000_000
TAKEOVER = 70
MINUTE = 60_000


def rid(n: int) -> bytes:
    return n.to_bytes(16, "big")


def running(n: int, output_tokens: int = 40, age_ms: int = 0, **fields: Any) -> RestatedRequest:
    values = {"attempt": 1, "tenant": "demo", "priority": 0, "input_tokens": 10, "end_ms": 10 * MINUTE}
    return RestatedRequest(rid(n), **{**values, "output_tokens": output_tokens, "age_ms": age_ms, **fields})


def restate(
    *requests: RestatedRequest, slot: int = 0, offset: int = TAKEOVER, role: str = "gateway"
) -> Restate:
    return Restate(role, slot, 5, offset, list(requests))


def used(n: int, tokens: int, accepted_at: int, attempt: int = 1) -> Usage:
    finish, at = "stop", accepted_at
    return Usage(rid(n), attempt, False, "demo", 0, "m", 10, 0, tokens - 10, finish, at, at + 1_000)


class Heir:
    """An admission process that has just taken partition 0 over, in a fleet of two gateways."""

    def __init__(
        self, partition: int = 0, coordinator_shards: tuple[int, ...] | None = None, **limits: int
    ) -> None:
        self.limits = Limits()
        entry = ClassLimits(0, **limits)
        self.limits.set_tenant(Tenant("demo", 0, [], [entry]), T0)
        self.restating = Restating(self.limits)
        self.partition = partition
        self.fleet = FleetView()
        self.fleet.watch_as("admission", 0, 9)
        self.coordinator_shards = coordinator_shards
        self.now = T0
        self.time = 0
        for _ in range(4):  # long enough to have heard everyone
            self.beat(announced=False)
        self.restating.hold([(partition, TAKEOVER)], self.now)

    def beat(self, announced: bool = True) -> None:
        self.time += 100
        status = PartitionStatus(self.partition, TAKEOVER, TAKEOVER, [])
        partitions = [status] if announced else []
        for slot in (0, 1):
            self.fleet.on_heartbeat(Heartbeat("gateway", slot, 5, b""), self.time)
        if self.coordinator_shards is not None:
            shards = list(self.coordinator_shards)
            self.fleet.on_heartbeat(Heartbeat("ledger", 0, 5, b"", coordinator_shards=shards), self.time)
        self.fleet.on_heartbeat(Heartbeat("admission", 0, 9, b"", partitions=partitions), self.time)

    def hear(self, said: Restate) -> None:
        self.restating.on_restate(decode(encode(said)), self.partition, self.now)

    def opens(self, wait_ms: int = 0) -> bool:
        self.now += wait_ms
        return [o.partition for o in self.restating.open_due(self.fleet, self.now)] == [self.partition]

    def status_of(self, n: int, tokens: int, now: int | None = None) -> int:
        at = self.now if now is None else now
        refusal = self.limits.reserve(rid(n), 1, "demo", 0, 0, tokens, at + MINUTE, at)
        return 0 if refusal is None else refusal.status


def test_opens_when_every_live_gateway_has_answered_and_the_rows_are_read() -> None:
    heir = Heir(max_concurrent_requests=2)
    heir.beat()
    assert not heir.opens()
    heir.hear(restate(running(1), slot=0))
    assert not heir.opens()
    heir.hear(restate(running(2), slot=1))
    assert not heir.opens()
    heir.restating.usage_is_read(0)
    assert heir.opens()
    assert heir.restating.is_open(0)
    assert heir.limits.num_concurrent("demo", 0) == 2
    assert heir.status_of(3, 1) == 429


def test_waits_no_longer_than_half_a_second_for_a_silent_owner_whose_word_counts_later() -> None:
    heir = Heir(max_concurrent_requests=1)
    heir.restating.usage_is_read(0)
    heir.beat()
    heir.hear(restate(slot=0))
    assert not heir.opens()
    assert not heir.opens(RESTATE_WAIT_MS - 1)
    assert heir.opens(1)
    heir.hear(restate(running(1), slot=1))
    assert heir.status_of(2, 1) == 429


def test_the_time_to_answer_begins_when_the_takeover_is_heard() -> None:
    heir = Heir()
    heir.restating.usage_is_read(0)
    assert not heir.opens(RESTATE_WAIT_MS + 1)
    heir.beat()
    assert not heir.opens()
    assert heir.opens(RESTATE_WAIT_MS)
    deaf = Heir()
    deaf.restating.usage_is_read(0)
    assert not deaf.opens(ANNOUNCE_WAIT_MS - 1)
    assert deaf.opens(1)


def test_rows_that_do_not_come_hold_it_up_for_a_while_only() -> None:
    heir = Heir()
    heir.beat()
    for slot in (0, 1):
        heir.hear(restate(slot=slot))
    assert not heir.opens(USAGE_WAIT_MS - 1)
    assert heir.opens(1)


def test_a_batch_partition_waits_for_its_coordinator() -> None:
    heir = Heir(partition=5, coordinator_shards=(0, 1))
    heir.restating.usage_is_read(5)
    heir.beat()
    for slot in (0, 1):
        heir.hear(restate(slot=slot))
    assert not heir.opens()
    heir.hear(restate(slot=0, role="ledger"))  # another shard's
    assert not heir.opens()
    heir.hear(restate(slot=1, role="ledger"))
    assert heir.opens()


@pytest.mark.parametrize("coordinator_shards", [None, (), (0,)])
def test_a_batch_partition_waits_for_no_coordinator_that_is_not_there(
    coordinator_shards: tuple[int, ...] | None,
) -> None:
    heir = Heir(partition=5, coordinator_shards=coordinator_shards)
    heir.restating.usage_is_read(5)
    heir.beat()
    for slot in (0, 1):
        heir.hear(restate(slot=slot))
    assert heir.opens()


def test_who_has_just_begun_to_listen_takes_nobody_for_dead() -> None:
    restating, fleet = Restating(Limits()), FleetView()
    fleet.watch_as("admission", 0, 9)
    restating.hold([(0, TAKEOVER)], T0)
    restating.usage_is_read(0)
    opened_at = None
    for time in range(100, 600, 100):
        if time > 200:  # the gateway's heartbeats come later than its own
            fleet.on_heartbeat(Heartbeat("gateway", 0, 5, b""), time)
            restating.on_restate(restate(running(1)), 0, T0 + time)
        fleet.on_heartbeat(Heartbeat("admission", 0, 9, b""), time)
        if restating.open_due(fleet, T0 + time):
            opened_at = time
            break
    assert opened_at == 400


def test_an_answer_to_another_takeover_is_none() -> None:
    heir = Heir(max_concurrent_requests=1)
    heir.restating.usage_is_read(0)
    heir.beat()
    for slot in (0, 1):
        heir.hear(restate(running(slot), slot=slot, offset=TAKEOVER - 1))
    assert not heir.opens()
    assert heir.opens(RESTATE_WAIT_MS)
    assert heir.limits.num_concurrent("demo", 0) == 0


def test_one_that_ended_before_its_owner_knew_does_not_stay_open() -> None:
    heir = Heir(max_concurrent_requests=1, tokens_per_minute=100)
    heir.beat()
    for slot in (0, 1):
        heir.hear(restate(*([running(1), running(2, attempt=2)] if slot == 0 else []), slot=slot))
    assert heir.restating.keep(used(1, 30, T0), 0)
    assert heir.restating.keep(used(2, 30, T0), 0)  # of its first attempt
    heir.restating.usage_is_read(0)
    assert heir.opens()
    assert heir.limits.num_concurrent("demo", 0) == 1
    assert heir.limits.rate_limits("demo", 0, heir.now) == [RateLimit("tokens", 100, 20, 48_000)]
    assert not heir.restating.keep(used(2, 40, T0, attempt=2), 0)  # from here on they settle at once


def test_a_partition_that_went_and_comes_back_begins_anew() -> None:
    heir = Heir(max_concurrent_requests=1)
    heir.restating.usage_is_read(0)
    assert heir.opens(ANNOUNCE_WAIT_MS)
    refusal = heir.limits.reserve(rid(1), 1, "demo", 0, 1, 1, heir.now + MINUTE, heir.now, partition=0)
    assert refusal is None
    heir.restating.hold([], heir.now)
    heir.limits.drop([0])
    assert heir.limits.num_concurrent("demo", 0) == heir.limits.num_remembered() == 0
    heir.restating.hold([(0, TAKEOVER + 9)], heir.now)
    assert not heir.restating.is_open(0)
    heir.limits.settle(rid(1), "demo", 0, 1, 1, heir.now, heir.now)  # a late row of the time before
    assert heir.limits.num_concurrent("demo", 0) == 0


# (time since the last, tokens reserved, tokens used; None while it runs, who owns it)
HISTORY = st.lists(
    st.tuples(
        st.integers(0, 30_000),
        st.integers(11, 100),
        st.one_of(st.none(), st.integers(11, 100)),
        st.booleans(),
    ),
    max_size=30,
)


@given(HISTORY, st.integers(1, 100))
def test_buckets_and_concurrency_come_to_where_the_holder_before_had_them(
    history: list[tuple[int, int, int | None, bool]], next_tokens: int
) -> None:
    """All that was let in within the minute is told: then a takeover changes no decision."""
    heir, before = Heir(tokens_per_minute=100, max_concurrent_requests=4), Limits()
    entry = ClassLimits(0, tokens_per_minute=100, max_concurrent_requests=4)
    before.set_tenant(Tenant("demo", 0, [], [entry]), T0)
    now = heir.now = T0 + sum(wait for wait, *_ in history)
    at = T0
    told: tuple[list[RestatedRequest], list[RestatedRequest]] = ([], [])
    for n, (wait, reserved, spent, second) in enumerate(history):
        at += wait
        if before.reserve(rid(n), 1, "demo", 0, 10, reserved - 10, at + 10 * MINUTE, at) is not None:
            continue
        if spent is None:
            told[second].append(running(n, reserved - 10, now - at))
        else:
            before.settle(rid(n), "demo", 0, 10, min(spent, reserved) - 10, at, at)
            assert heir.restating.keep(used(n, min(spent, reserved), at), 0)
    heir.beat()
    heir.restating.usage_is_read(0)
    for slot in (0, 1):
        heir.hear(restate(*told[slot], slot=slot))
    assert heir.opens()
    assert heir.limits.num_concurrent("demo", 0) == before.num_concurrent("demo", 0)
    assert heir.limits.reserved_tokens("demo", 0) == before.reserved_tokens("demo", 0)
    mine, theirs = (
        limits.reserve(rid(999), 1, "demo", 0, 0, next_tokens, now + MINUTE, now)
        for limits in (heir.limits, before)
    )
    assert (mine and mine.code) == (theirs and theirs.code)
    assert (mine and mine.retry_after_ms) == pytest.approx(theirs and theirs.retry_after_ms, abs=1)


# The other side: what a gateway says


class Desk:
    def __init__(self) -> None:
        self.owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
        self.view = FleetView()
        self.view.watch_as("gateway", SLOT, EPOCH)
        self.time = 0

    def take(self, n: int, *, dispatched: bool) -> int:
        """The partition of inference.requests."""
        owned = self.owner.accept(inference_request(rid(n)), WholeReader("simulated", Timing(), 0.0))
        self.owner.on_sent(owned, 100)
        if dispatched:
            self.owner.on_record(Dispatched(rid(n), 1, EPOCH, 0, WORKER_EPOCH, "simulated"), 0)
        return owned.partition

    def tick(self, *takeovers: tuple[int, int], now_ms: int = 2_000) -> list[Any]:
        self.time += 100
        statuses = [PartitionStatus(partition, offset, offset, []) for partition, offset in takeovers]
        self.view.on_heartbeat(Heartbeat("gateway", SLOT, EPOCH, b""), self.time)
        self.view.on_heartbeat(Heartbeat("admission", 0, 9, b"", partitions=statuses), self.time)
        return self.owner.tick(self.view, now_ms, 0.0)


def test_a_gateway_answers_each_takeover_once_before_it_sends_again() -> None:
    desk = Desk()
    partition = desk.take(1, dispatched=True)
    desk.take(2, dispatched=False)
    assert [type(a) for a in desk.tick((partition, 7))] == [Restated]
    assert desk.tick((partition, 7)) == []
    said, again = desk.tick((partition, 200), (partition + 1, 3))[:2]
    assert (said.partition, said.record.takeover_offset) == (partition, 200)
    assert (said.record.owner_role, said.record.owner_slot, said.record.owner_epoch) == (
        "gateway",
        SLOT,
        EPOCH,
    )
    (request,) = said.record.requests  # the other one waits: it is sent again
    owned = desk.owner.open[rid(1)]
    assert (request.request_id, request.attempt, request.tenant) == (rid(1), 1, owned.request.tenant)
    assert request.input_tokens == len(owned.request.prompt_token_ids)
    assert request.output_tokens == owned.request.sampling.max_tokens
    assert (request.age_ms, request.end_ms) == (2_000 - owned.request.accepted_at, owned.request.end_ms)
    assert again.record.requests == []  # nothing runs there: admission waits for that word too


def test_a_gateway_that_may_not_own_any_more_says_nothing_yet() -> None:
    desk = Desk()
    partition = desk.take(1, dispatched=True)
    desk.owner.held = True
    assert desk.tick((partition, 7)) == []
    desk.owner.held = False
    assert [type(a) for a in desk.tick((partition, 7))] == [Restated]


def test_a_batch_coordinator_says_what_it_runs_once_a_takeover() -> None:
    world = World()
    for name in ("runs", "waits"):
        world.accept(make_item(name))
    first = world.requests[0]
    world.say(dispatched(first))
    shard = world.shard.reply_partition
    for takeover in (0, 0, 9):
        world.admission = {shard: AdmissionOffsets(takeover, takeover)}
        world.tick(100)
    assert [said.takeover_offset for said in world.restated] == [0, 9]
    said = world.restated[-1]
    assert (said.owner_role, said.owner_slot, said.owner_epoch) == ("ledger", 0, world.epoch)
    (request,) = said.requests
    assert (request.request_id, request.attempt, request.priority) == (first.request_id, 1, 2)
    assert request.input_tokens == len(first.prompt_token_ids)
    assert request.output_tokens == first.sampling.max_tokens
    assert request.end_ms == first.end_ms
