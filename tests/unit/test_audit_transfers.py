"""What the audit says of transfers: nothing of what the protocol does, and by name what is wrong."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest

from infra.audit.checks import Tolerances
from infra.audit.findings import Finding, Kind
from infra.audit.fleet import counted_handoffs
from infra.audit.request_log import RequestLog
from infra.audit.transfers import Counted, TransferLog
from schemas.handoff_records import Message
from schemas.records import Completion, Handoff, Heartbeat, Offer, TransferEnded
from schemas.stream_state import Run
from tests.handoff_lives import Violation
from tests.handoff_world import World
from tests.unit.test_handoff_explored import _CHAOS, _PEACE, other, without
from tests.unit.test_handoff_records import STATUS
from workers.handoff import decode_side, prefill_side
from workers.handoff.states import DECODE, PREFILL, Action, Event, Row, State

LATE_MS = 1_000_000
ALLOWED = Tolerances()


class Log(list[tuple[int, object]]):
    """The network of a World, and all that was ever sent over it, with the time (s)."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.sent: list[tuple[float, object]] = []

    def append(self, message: tuple[int, object]) -> None:
        self.sent.append((self.world.now, message[1]))
        super().append(message)


def played(seed: int, *, chaos: int) -> World:
    """So many events of all kinds, then peace."""
    world = World(Random(seed), sound=not chaos)
    world.network = Log(world)
    if not chaos:
        for _ in range(3):
            world.dispatch()
        for _ in range(60):
            for event in _PEACE:
                event(world)
    events, weights = zip(*_CHAOS, strict=True)
    for event in world.random.choices(events, weights, k=chaos):
        event(world)
    for _ in range(250):
        for event in _PEACE:
            event(world)
        world.pass_time()
    return world


def sent(world: World) -> list[tuple[float, object]]:
    assert isinstance(world.network, Log)
    return world.network.sent


def live(world: World) -> Counted:
    runs = (world.prefill.side.run, world.decode.side.run)
    return {Run(run.slot, run.epoch): frozenset() for run in runs}


def audited(
    records: Iterable[tuple[float, object]],
    counted: Counted,
    *,
    ended: Iterable[bytes] = (),
    now_ms: int = LATE_MS,
) -> list[Finding]:
    """`ended`: requests that have their end in the log."""
    records = list(records)
    requests = RequestLog(0, in_flight_ms=0)
    for _, record in records:
        if isinstance(record, Offer):
            requests.on_request(record.request)
    for request_id in ended:
        requests.on_reply(0, Completion(request_id, 1, 1, 12, 3, 0, 0, "stop"), 1)
    transfers = TransferLog(requests)
    for at, record in records:
        transfers.on_record(record, int(at * 1_000))
    found = list(transfers.judge(counted, now_ms, ALLOWED))
    return found + list(transfers.counted_too_long(counted, now_ms))


def test_nothing_is_found_of_what_the_protocol_does() -> None:
    num_transfers = 0
    for seed in range(400):
        world = played(seed, chaos=250)
        found = audited(sent(world), live(world))
        assert found == [], (seed, [(at, r) for at, r in sent(world) if _names(r, found)])
        num_transfers += len({r.transfer_id for _, r in sent(world) if isinstance(r, Offer)})
    assert num_transfers > 2_000


def _names(record: object, found: list[Finding]) -> bool:
    assert isinstance(record, Message)
    return record.transfer_id.hex() in {each.figures["transfer"] for each in found}


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        (
            Kind.STRANDED_BLOCKS,
            without(PREFILL, State.TRANSFERRING, Event.PEER_ENDED, Action.STOP_WRITES),
            DECODE,
        ),
        (
            Kind.OPEN_TRANSFER,
            without(PREFILL, State.TRANSFERRING, Event.DEADLINE, Action.STOP_WRITES),
            DECODE,
        ),
        (Kind.OPEN_TRANSFER, PREFILL, other(DECODE, State.RESERVED, Event.DEADLINE, Row(State.RESERVED))),
    ],
    ids=["prefill writes on", "prefill writes on behind its deadline", "decode has no deadline"],
)
def test_a_fault_in_the_protocol_is_named(
    kind: Kind,
    prefill: dict[State, dict[Event, Row]],
    decode: dict[State, dict[Event, Row]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_side, "PREFILL", prefill)
    monkeypatch.setattr(decode_side, "DECODE", decode)
    # It would stop there: here the log is to tell.
    monkeypatch.setattr(World, "pass_time", _only_pass_time)
    kinds: set[Kind] = set()
    for seed in range(400):
        try:
            world = played(seed, chaos=250)
        except Violation:
            continue
        kinds |= {each.kind for each in audited(sent(world), live(world))}
    assert kind in kinds


def _only_pass_time(world: World) -> None:
    world.now += world.random.choice((0.0, 0.05, 0.3))
    for call in [c for c in world.flying if c.lands_by <= world.now]:
        world.flying.remove(call)
    world._prefill_does(world.prefill.side.tick(world.now))
    world._decode_does(world.decode.side.tick(world.now))


VICTIM = (1).to_bytes(16, "big")
Alter = Callable[[World, list[tuple[float, object]]], list[tuple[float, object]]]


def changed(
    records: list[tuple[float, object]], change: Callable[[Message], object]
) -> list[tuple[float, object]]:
    """`change` gives the record in place of each of the victim's, or None to leave it out."""
    found = []
    for at, record in records:
        assert isinstance(record, Message)
        of_victim = record.transfer_id == VICTIM
        if (kept := change(record) if of_victim else record) is not None:
            found.append((at, kept))
    return found


def never_end(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    return changed(records, lambda r: None if isinstance(r, TransferEnded) else r)


def strand_blocks(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    """Decode gives up what prefill writes to, and prefill says no more."""

    def change(record: Message) -> object:
        if isinstance(record, TransferEnded):
            return (
                replace(record, state="aborted") if record.from_slot == world.decode.side.run.slot else None
            )
        return None if isinstance(record, Handoff) else record

    return changed(records, change)


def adopt_elsewhere_too(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    told = adopted(records)
    return [*records, (1.0, replace(told, from_slot=told.from_slot + 1, from_epoch=told.from_epoch + 5))]


def adopt_a_second_transfer(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    """Of the same attempt, at the same run."""
    of_victim = [r for _, r in records if isinstance(r, Message) and r.transfer_id == VICTIM]
    return records + [(1.0, replace(record, transfer_id=b"second")) for record in of_victim]


def lose_the_handoff(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    return changed(records, lambda r: None if isinstance(r, Handoff) else r)


def end_in_another_way_too(world: World, records: list[tuple[float, object]]) -> list[tuple[float, object]]:
    return [*records, (1.0, replace(adopted(records), state="expired"))]


def adopted(records: list[tuple[float, object]]) -> TransferEnded:
    return next(
        r
        for _, r in records
        if isinstance(r, TransferEnded) and (r.transfer_id, r.state) == (VICTIM, "adopted")
    )


@pytest.mark.parametrize(
    ("kinds", "alter"),
    [
        ([Kind.OPEN_TRANSFER], never_end),
        ([Kind.OPEN_TRANSFER, Kind.STRANDED_BLOCKS], strand_blocks),
        ([Kind.ADOPTED_TWICE], adopt_elsewhere_too),
        ([Kind.ADOPTED_TWICE], adopt_a_second_transfer),
        ([Kind.ADOPTED_UNWRITTEN], lose_the_handoff),
        ([Kind.TRANSFER_ENDS_DIFFER], end_in_another_way_too),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_each_fault_is_named_with_its_request(kinds: list[Kind], alter: Alter) -> None:
    world = played(1, chaos=0)
    records = sent(world)
    assert len({r.transfer_id for _, r in records if isinstance(r, Offer)}) == 3
    assert audited(records, live(world)) == []
    found = audited(alter(world, records), live(world))
    assert [(each.kind, each.request_id, each.tenant) for each in found] == [
        (kind, VICTIM.hex(), "t") for kind in kinds
    ]
    assert all(each.figures["prefill"] and each.figures["decode"] for each in found)


def test_a_transfer_is_not_open_while_it_has_time_or_where_a_run_is_over() -> None:
    world = played(1, chaos=0)
    records = never_end(world, sent(world))
    offer = next(r for _, r in records if isinstance(r, Offer))
    assert audited(records, live(world), now_ms=offer.lease_ms) == []
    assert audited(records, live(world), now_ms=offer.lease_ms + ALLOWED.transfer_ms + 1)
    # Its request's end is its end, too.
    early = offer.lease_ms - 1
    assert audited(records, live(world), now_ms=ALLOWED.transfer_ms + early, ended=[VICTIM])
    for gone in live(world):
        assert audited(records, {run: () for run in live(world) if run != gone}) == []  # type: ignore[misc]


def test_a_handoff_that_a_worker_counts_for_ever_is_named() -> None:
    world = played(1, chaos=0)
    decode = Run(world.decode.side.run.slot, world.decode.side.run.epoch)
    counted = {**live(world), decode: frozenset([VICTIM])}
    assert audited(sent(world), counted) == []  # its request runs
    (found,) = audited(sent(world), counted, ended=[VICTIM])
    assert (found.kind, found.request_id, found.figures["slot"]) == (
        Kind.LEAKED_HANDOFF,
        VICTIM.hex(),
        decode.slot,
    )


def test_what_a_life_counts_is_in_all_its_heartbeats() -> None:
    def beat(epoch: int, *handoffs: bytes) -> Heartbeat:
        return Heartbeat("worker", 1, epoch, b"n", None, replace(STATUS, handoffs=list(handoffs)))

    beats = [beat(5, b"old"), beat(7, b"a", b"b"), beat(7, b"b"), Heartbeat("gateway", 0, 9, b"n")]
    assert counted_handoffs(beats) == {Run(1, 7): {b"b"}}
