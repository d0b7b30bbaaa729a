"""What is done to the stack: each fault does its harm, and puts right what would not come back by itself."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from infra.chaos_run import failpoints
from infra.chaos_run.chaos_stack import ChaosStack
from infra.chaos_run.small_disk import fill
from infra.local.stack import BROKER
from schemas.handoff_records import WorkerRole

Fault = Callable[[ChaosStack, random.Random], Awaitable[str]]
_POINT_PASSED_S = 20.0
_GONE_S = 40.0
_LOOK_S = 0.02
# Of a machine that has too much to do: how long it took is in the figures.
_BROKER_START_S = 180.0
_LEADERLESS_S = 8.0
_CLOCK_OFF_S = 12.0
_ROLES = ("gateway", "admission", "ledger", "worker")


async def _gone(chaos: ChaosStack, name: str) -> None:
    async with asyncio.timeout(_GONE_S):
        while chaos.stack.child(name).running:  # noqa: ASYNC110 - the kernel sets no Event
            await asyncio.sleep(_LOOK_S)


def _one(chaos: ChaosStack, rng: random.Random, who: str) -> str:
    return rng.choice(chaos.named(who))


async def _killed(role: str, chaos: ChaosStack, rng: random.Random) -> str:
    name = _one(chaos, rng, role)
    chaos.stack.kill(name)
    await chaos.stack.restart(name)
    return name


async def _worker_proper_killed(chaos: ChaosStack, rng: random.Random) -> str:
    """Not its parent, which says Left."""
    name = _one(chaos, rng, "worker")
    pid = chaos.stack.child(name).pid
    for child in _children(pid):
        os.kill(child, signal.SIGKILL)
    await _gone(chaos, name)
    await chaos.stack.restart(name)
    return name


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _terminated(role: str, chaos: ChaosStack, rng: random.Random) -> str:
    name = _one(chaos, rng, role)
    os.kill(chaos.stack.child(name).pid, signal.SIGTERM)
    await _gone(chaos, name)
    await chaos.stack.restart(name)
    return name


async def _stopped(role: str, seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    """SIGSTOP of the process and its children. One that finds its slot taken when it wakes may end."""
    name = BROKER if role == BROKER else _one(chaos, rng, role)
    group = chaos.stack.child(name).pid
    os.killpg(group, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.killpg(group, signal.SIGCONT)
    return name


async def _gateway_and_worker(chaos: ChaosStack, rng: random.Random) -> str:
    names = [_one(chaos, rng, "gateway"), _one(chaos, rng, "worker")]
    for name in names:
        chaos.stack.kill(name)
    await asyncio.gather(*(chaos.stack.restart(name) for name in names))
    return " and ".join(names)


async def _rolling_workers(chaos: ChaosStack, rng: random.Random) -> str:
    names = [name for name in chaos.processes if name.startswith("worker")]
    for name in names:
        await chaos.stack.restart(name)
    return ", ".join(names)


async def _broker_killed(chaos: ChaosStack, rng: random.Random) -> str:
    assert chaos.stack.broker is not None
    chaos.stack.broker.kill()
    await chaos.stack.broker.start(_BROKER_START_S)
    return BROKER


async def _broker_away(seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    assert chaos.stack.broker is not None
    await chaos.stack.broker.stop()
    await asyncio.sleep(seconds)
    await chaos.stack.broker.start(_BROKER_START_S)
    return BROKER


async def _leader_killed(chaos: ChaosStack, rng: random.Random) -> str:
    """kill -9 of one of three brokers, which leads a third of all partitions; it is back after a while."""
    name = rng.choice(list(chaos.stack.more_brokers))
    chaos.stack.kill(name)
    await asyncio.sleep(_LEADERLESS_S)
    await chaos.stack.restart(name)
    return name


async def _black_holed(who: str, seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    name = rng.choice([name for name in chaos.named(who) if name in chaos.holes])
    await chaos.holes[name].swallow(seconds)
    return name


async def _at_point(point: str, chaos: ChaosStack, rng: random.Random) -> str:
    """Kills whoever passes `point` next."""
    file = chaos.armed / point
    file.touch()
    try:
        async with asyncio.timeout(_POINT_PASSED_S):
            while file.exists():  # noqa: ASYNC110 - another process takes it away
                await asyncio.sleep(_LOOK_S)
    finally:
        file.unlink(missing_ok=True)
    dead = await _dead(chaos, chaos.named(point.split(".")[0]))
    await chaos.stack.restart(dead)
    return f"{dead}: {failpoints.ALL_KILLS[point]}"


async def _dead(chaos: ChaosStack, names: Iterable[str]) -> str:
    async with asyncio.timeout(_GONE_S):
        while True:
            for name in names:
                if not chaos.stack.child(name).running:
                    return name
            await asyncio.sleep(_LOOK_S)


async def _while(state: str, seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    """A state of a worker (`state`-slot) or of all ledgers lasts for so long."""
    name = "ledger" if state.startswith("ledger") else _one(chaos, rng, "worker")
    file = chaos.armed / (state if name == "ledger" else f"{state}-{name.split('-')[1]}")
    file.touch()
    try:
        await asyncio.sleep(seconds)
    finally:
        file.unlink()
    return name


async def _clock_stepped(seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    """The clock of one process is off for a while, and then right again."""
    name = _one(chaos, rng, rng.choice(_ROLES))
    file = chaos.armed / f"{failpoints.CLOCK}-{name}"
    file.write_text(str(int(seconds * 1_000)))
    try:
        await asyncio.sleep(_CLOCK_OFF_S)
    finally:
        file.unlink()
    return name


async def _disk_full(seconds: float, chaos: ChaosStack, rng: random.Random) -> str:
    """No file can be written; what is there can be read."""
    if chaos.small_disk is None:
        return "not done: no tmpfs can be mounted here"
    filler = chaos.small_disk / "filler"
    try:
        await asyncio.to_thread(fill, filler)
        await asyncio.sleep(seconds)
    finally:
        filler.unlink(missing_ok=True)
    return "the object store"


async def _wrong_tokens(chaos: ChaosStack, rng: random.Random) -> str:
    """The canary of the worker finds it out, and it ends."""
    name = _one(chaos, rng, "worker")
    file = chaos.armed / f"{failpoints.WRONG}-{name.split('-')[1]}"
    file.touch()
    try:
        await _gone(chaos, name)
    finally:
        file.unlink()
    await chaos.stack.restart(name)
    return name


async def restart_the_dead(chaos: ChaosStack) -> list[str]:
    """What has ended meanwhile, by a fault or for one, as a supervisor would do it."""
    dead = [name for name in chaos.processes if not chaos.stack.child(name).running]
    for name in dead:
        with suppress(KeyError):
            await chaos.stack.restart(name)
    return dead


WRONG_TOKENS = "worker_wrong_tokens"


def faults(*, simulated: bool, brokers: int, disaggregated: bool = False) -> dict[str, Fault]:
    """By name, the quick ones first."""
    found: dict[str, Fault] = {"worker_proper_killed": _worker_proper_killed}
    if disaggregated:
        found |= {f"at_{point}": partial(_at_point, point) for point in failpoints.HANDOFF_KILLS}
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            found[f"{role}_killed"] = partial(_killed, role)
            found[f"{role}_terminated"] = partial(_terminated, role)
            found[f"{role}_stopped_5s"] = partial(_stopped, role, 5.0)
            if brokers == 1:
                found[f"{role}_black_holed_5s"] = partial(_black_holed, role, 5.0)
    found |= {f"{role}_killed": partial(_killed, role) for role in _ROLES}
    found |= {f"at_{point}": partial(_at_point, point) for point in failpoints.KILLS}
    found |= {
        "gateway_and_worker_killed": _gateway_and_worker,
        "broker_stopped_3s": partial(_stopped, BROKER, 3.0),
        "broker_killed": _broker_killed,
    }
    found |= {f"{role}_terminated": partial(_terminated, role) for role in _ROLES}
    found |= {f"{role}_stopped_5s": partial(_stopped, role, 5.0) for role in _ROLES}
    found |= {"rolling_workers": _rolling_workers, "disk_full_10s": partial(_disk_full, 10.0)}
    if brokers == 1:
        found |= {f"black_holed_{seconds}s": partial(_black_holed, "", seconds) for seconds in (5, 30)}
    else:
        found["leader_killed"] = _leader_killed
    if simulated:
        found[WRONG_TOKENS] = _wrong_tokens
        found["worker_slow_10s"] = partial(_while, failpoints.SLOW, 10.0)
    found |= {
        "clock_10s_ahead": partial(_clock_stepped, 10.0),
        "clock_10s_behind": partial(_clock_stepped, -10.0),
        "clickhouse_away_20s": partial(_while, failpoints.STORE_AWAY, 20.0),
        "broker_away_20s": partial(_broker_away, 20.0),
        "broker_away_45s": partial(_broker_away, 45.0),
    }
    return found | {f"{role}_stopped_60s": partial(_stopped, role, 60.0) for role in _ROLES}
