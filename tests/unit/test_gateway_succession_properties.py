"""Gateways die, sleep and wake, workers die, readers come and go: one end, one bill, and no owner acts for
another's request.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Completion, Failed
from tests.gateway_world import RID, SUCCESSION_MS, World, token_at

KINDS = ["dispatch", "tokens", "read", "time", "die", "give up", "nap", "nap", "kill"]
KINDS += ["join", "attach", "detach", "leave", "death"]
# (what, whose slot, how much). Slot 1 is the owner's, so it is drawn more often.
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 1, 0, 2]), st.integers(1, 4)),
    min_size=6,
    max_size=25,
)


def run_to_the_end(world: World) -> None:
    """Whoever lives now goes on; one gateway does in any case, workers and admission too."""
    for gateway in world.gateways:
        world.wake(gateway)
    if not any(g.alive for g in world.gateways):
        world.join(0)
    for _ in range(40):
        while world.waiting:
            world.dispatch(0)
        for gateway in world.gateways:
            if gateway.alive:
                gateway.read(1_000)
        for worker in world.runs:
            world.step(worker, 3)
        world.pass_ms(500)
        if world.fold().ended and not world.fold().may_retry:
            break
    for _ in range(2):
        for gateway in world.gateways:
            if gateway.alive:
                gateway.read(1_000)
        world.pass_ms(SUCCESSION_MS + 100)


@settings(max_examples=500)
@given(STEPS, st.sampled_from([0, 500, 60_000]), st.sets(st.sampled_from([0, 1, 2])), st.booleans())
def test_one_end_one_bill_and_one_owner(
    steps: list[tuple[str, int, int]], detach_ms: int, laggards: set[int], begun: bool
) -> None:
    """`laggards` are slots that read the log in steps of their own, the others read it at once. `begun`:
    there are tokens, and a reader at slot 0.
    """
    world = World()
    gateways = [world.join(slot) for slot in (1, 0, 2)]
    world.pass_ms(300)
    world.accept(detach_ms)
    is_there = True
    if begun:
        steps = [("dispatch", 0, 1), ("tokens", 0, 2), ("read", 1, 4), ("attach", 0, 1), *steps]
    for kind, slot, count in steps:
        gateway = [g for g in world.gateways if g.owner.slot == slot][-1]
        match kind:
            case "dispatch":
                world.dispatch(slot)
            case "tokens" if world.runs:
                world.step(world.runs[-1], count)
            case "read" if gateway.alive:
                gateway.read(count)
            case "time":
                world.pass_ms(count * 600)
            case "die" if world.runs:
                world.die(world.runs[-1])
            case "give up" if world.runs:
                world.give_up(world.runs[-1])
            case "nap" if gateway.alive and world.num_up > 1:
                gateway.stopped = True
                world.pass_ms(count * 600)
                world.wake(gateway)
            case "kill" if gateway.alive:
                gateway.alive = False
            case "death" if gateway.alive:  # of a host: the gateway's and the worker's
                gateway.alive = False
                for run in world.runs[-1:]:
                    world.die(run)
            case "join" if not gateway.alive:
                world.join(slot)
            case "attach" if gateway.alive:
                world.attach(gateway)
            case "detach" if gateway.alive:
                world.detach(gateway)
            case "leave" if is_there and gateways[0].alive:
                is_there = False
                owned = gateways[0].owner.open.get(RID)
                if owned is not None:
                    gateways[0].do(gateways[0].owner.leave(owned, "disconnected"))
        for reading in world.gateways:
            if reading.alive and not reading.owner.held and reading.owner.slot not in laggards:
                reading.read(1_000)
    run_to_the_end(world)
    state = world.fold()
    if state.request_at is None:
        return  # no record of it: nothing ran
    assert state.token_ids == [token_at(p) for p in range(len(state.token_ids))]
    assert state.end is not None
    assert all(g.owner.open.get(RID) is None for g in world.gateways if g.alive)
    assert world.misdeeds == []
    # Whoever bills says the same, and it is what was told.
    assert {(b.output_tokens, b.attempt) for b in world.bills} <= {(len(state.token_ids), state.attempt)}
    if isinstance(state.end, Failed):
        # A worker that said Completion has billed; its owner may have said Failed before it read that.
        assert world.bills or any(isinstance(r, Completion) and r.attempt == state.attempt for r in world.log)
    if isinstance(state.end, Completion):
        assert state.end.output_tokens == len(state.token_ids)
        # What a worker gave up by itself is tried again while anybody may come back.
        assert state.end.finish_reason == "length" or world.is_unwanted or detach_ms < 60_000
