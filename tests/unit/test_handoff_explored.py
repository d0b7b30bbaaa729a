"""The handoff protocol under every order of events that a seed can think of.

Messages are lost, doubled, late and reordered; calls fail, land wrong bytes, or land after they have failed;
requests are cancelled and preempted; either side dies at any point and lives again, or stands still for long,
in the midst of a call, and goes on.
"""

from collections.abc import Callable
from random import Random

import pytest

from tests.handoff_lives import NUM_BLOCKS, Violation
from tests.handoff_world import World
from workers.handoff import decode_side, landing, prefill_side
from workers.handoff.states import DECODE, PREFILL, TERMINAL, Action, Event, Row, State, Table

_CHAOS: list[tuple[Callable[[World], None], int]] = [
    (World.dispatch, 4),
    (World.compute, 12),
    (World.begin_call, 12),
    (World.land, 12),
    (World.end_call, 12),
    (World.drop_call, 2),
    (World.close_stopped, 6),
    (World.hear_writer, 12),
    (World.deliver, 24),
    (World.drop, 2),
    (World.engine_step, 12),
    (World.verify, 8),
    (World.finish_running, 4),
    (World.cancel, 1),
    (World.preempt, 1),
    (World.kill_prefill, 1),
    (World.kill_decode, 1),
    (World.hear, 3),
    (World.pass_time, 12),
]
_STOPS: list[tuple[Callable[[World], None], int]] = [
    (World.stop, 4),
    (World.stand_still, 24),
    (World.suspect, 12),
    (World.wake, 4),
    (World.kill_prefill, 2),
    (World.hear, 8),
]
_PEACE = [
    World.deliver,
    World.compute,
    World.begin_call,
    World.land,
    World.end_call,
    World.drop_call,
    World.close_stopped,
    World.hear_writer,
    World.engine_step,
    World.verify,
    World.finish_running,
    World.hear,
]
_STEPS = 250
_SEEDS = 1500


def explore(seed: int) -> World:
    """Chaos, then peace until all is quiet. Raises Violation."""
    world = World(Random(seed))
    # Who stands still does nothing: in half of all worlds nobody does.
    chaos = _CHAOS + _STOPS if seed % 2 else _CHAOS
    events, weights = zip(*chaos, strict=True)
    for event in world.random.choices(events, weights, k=_STEPS):
        event(world)
    world.wake()
    for _ in range(250):
        for event in _PEACE:
            event(world)
        world.pass_time()
    for _ in range(40):
        for event in _PEACE:
            event(world)
    check_rest(world)
    return world


def check_rest(world: World) -> None:
    """All has ended, nothing is held, and who was offered was served once, or nobody wants it."""
    prefill, decode = world.prefill, world.decode
    for life, name in ((prefill, "prefill"), (decode, "decode")):
        for transfer_id in life.deadlines:
            state = life.side.state(transfer_id)
            if state is not None:
                raise Violation(f"{name} still has {transfer_id.hex()} in {state}")
        if life.side.num_live:
            raise Violation(f"{name} has transfers left")
        if life.pool.num_free_blocks != NUM_BLOCKS:
            raise Violation(f"{NUM_BLOCKS - life.pool.num_free_blocks} blocks are lost at {name}")
    for transfer_id, epoch in world.offered.items():
        wanted = epoch == decode.side.run.epoch and transfer_id not in world.cancelled
        if wanted and transfer_id not in decode.served:
            raise Violation(f"{transfer_id.hex()} was offered and nobody serves it")


def test_whatever_happens_transfers_end_blocks_balance_and_bytes_are_right() -> None:
    served: dict[str, int] = {}
    for seed in range(_SEEDS):
        try:
            world = explore(seed)
        except (Violation, AssertionError, ValueError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        for how in world.decode.served.values():
            served[how] = served.get(how, 0) + 1
    # The chaos must not be so great that nothing ever works.
    assert served["Adopt"] > 100, served
    assert served["Recompute"] > 100, served
    assert served["RetryElsewhere"] > 20, served


def without(table: Table, state: State, event: Event, action: Action) -> Table:
    row = table[state][event]
    kept = tuple(a for a in row.actions if a is not action)
    assert kept != row.actions
    return {**table, state: {**table[state], event: Row(row.state, kept)}}


def other(table: Table, state: State, event: Event, row: Row) -> Table:
    assert table[state][event] != row
    return {**table, state: {**table[state], event: row}}


_S, _E, _A = State, Event, Action
_MUTANTS: dict[str, tuple[str, Table]] = {
    "decode frees at its deadline, not when the writes are closed": (
        "decode",
        other(DECODE, _S.RESERVED, _E.DEADLINE, Row(_S.EXPIRED, (_A.FREE, _A.FALL_BACK, _A.SEND_ENDED))),
    ),
    "decode frees when prefill has given up, though calls run": (
        "decode",
        other(DECODE, _S.RESERVED, _E.PEER_ENDED, Row(_S.ABORTED, (_A.FREE, _A.FALL_BACK))),
    ),
    "decode frees at the death of prefill, before all has landed": (
        "decode",
        other(DECODE, _S.RESERVED, _E.PEER_GONE, Row(_S.ABORTED, (_A.FREE, _A.FALL_BACK))),
    ),
    "decode frees before what a failed call had sent has landed": (
        "decode",
        other(DECODE, _S.ABORTED, _E.PEER_BROKE_OFF, Row(_S.ABORTED, (_A.FREE,))),
    ),
    "decode frees when cancelled, though calls run": (
        "decode",
        other(DECODE, _S.RESERVED, _E.CANCELLED, Row(_S.ABORTED, (_A.FREE, _A.SEND_ENDED))),
    ),
    "decode adopts what was not verified": (
        "decode",
        other(DECODE, _S.RECEIVED, _E.FAILED, Row(_S.ADOPTED, (_A.ADOPT,))),
    ),
    "decode never asks again": (
        "decode",
        without(
            without(DECODE, _S.EXPIRED, _E.ASK_AGAIN, _A.SEND_ENDED),
            _S.ABORTED,
            _E.ASK_AGAIN,
            _A.SEND_ENDED,
        ),
    ),
    "decode does not fall back at its deadline": (
        "decode",
        without(DECODE, _S.RESERVED, _E.DEADLINE, _A.FALL_BACK),
    ),
    "decode falls back a second time": (
        "decode",
        other(DECODE, _S.ABORTED, _E.PEER_CLOSED, Row(_S.ABORTED, (_A.FREE, _A.FALL_BACK))),
    ),
    "decode has no deadline": ("decode", other(DECODE, _S.RESERVED, _E.DEADLINE, Row(_S.RESERVED))),
    "decode keeps the blocks of what failed": (
        "decode",
        without(DECODE, _S.RECEIVED, _E.FAILED, _A.FREE),
    ),
    "prefill frees while its calls read": (
        "prefill",
        other(PREFILL, _S.TRANSFERRING, _E.DEADLINE, Row(_S.EXPIRED, (_A.STOP_WRITES, _A.FREE))),
    ),
    "prefill does not stop its writes": (
        "prefill",
        without(PREFILL, _S.TRANSFERRING, _E.PEER_ENDED, _A.STOP_WRITES),
    ),
    "prefill keeps blocks after adoption": (
        "prefill",
        without(PREFILL, _S.RECEIVED, _E.PEER_ADOPTED, _A.FREE),
    ),
    "prefill waits for adoption for ever": (
        "prefill",
        other(PREFILL, _S.RECEIVED, _E.DEADLINE, Row(_S.RECEIVED)),
    ),
    "prefill does not answer when asked": (
        "prefill",
        other(PREFILL, _S.ABORTED, _E.CLOSED, Row(_S.ABORTED)),
    ),
}


@pytest.mark.parametrize("name", list(_MUTANTS))
def test_a_fault_in_the_table_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each promise is broken once: the exploration must notice, else it would prove nothing."""
    side, table = _MUTANTS[name]
    if side == "decode":
        monkeypatch.setattr(decode_side, "DECODE", table)
    else:
        monkeypatch.setattr(prefill_side, "PREFILL", table)
    for seed in range(_SEEDS):
        try:
            explore(seed)
        except (Violation, ValueError):
            return
    pytest.fail("no seed noticed")


def each_seed(explored: Callable[[int], object], num_seeds: int) -> None:
    for seed in range(num_seeds):
        explored(seed)


def test_a_silent_prefill_that_is_taken_for_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time that it is given."""

    def suspect(world: World) -> None:
        stopped_at = world.prefill.stopped_at
        if stopped_at is not None and world.now - stopped_at > 300 and world.decode.stopped_at is None:
            world._decode_does(world.decode.side.on_gone(world.prefill.side.run, world.now))

    stops = [(suspect if event is World.suspect else event, weight) for event, weight in _STOPS]
    monkeypatch.setitem(globals(), "_STOPS", stops)
    with pytest.raises(Violation, match="a write"):
        each_seed(explore, _SEEDS)


def stop_while_it_lands(seed: int) -> None:
    """Prefill dies in the midst of calls, and decode is stopped when it has heard of that. Then peace."""
    world = World(Random(seed))
    events, weights = zip(*_CHAOS, strict=True)
    for event in world.random.choices(events, weights, k=60):
        event(world)
    world.kill_prefill()
    while world.unheard:
        world.hear()
    world.decode.stopped_at = world.now
    world.stand_still()
    world.wake()
    for _ in range(50):
        for event in _PEACE:
            event(world)
        world.pass_time()


def test_what_was_sent_to_decode_lands_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    each_seed(stop_while_it_lands, 300)
    monkeypatch.setattr(landing, "LOOK_S", float("inf"))  # it believes its clock
    with pytest.raises(Violation, match="a write"):
        each_seed(stop_while_it_lands, 300)


def test_every_state_and_event_is_given() -> None:
    for table, events in ((PREFILL, set[Event]()), (DECODE, set[Event]())):
        for rows in table.values():
            events |= rows.keys()
        for state, rows in table.items():
            assert rows.keys() == events, f"{state} lacks {events - rows.keys()}"
        for state in table.keys() & TERMINAL:
            assert {row.state for row in rows.values()} <= TERMINAL
            assert all(row.state is state for row in table[state].values()), state
