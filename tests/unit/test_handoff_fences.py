"""Decode's blocks when nobody hears of who may still write to them: others get them by no clock."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.records import Heartbeat, InferenceRequest, Left
from schemas.stream_state import Run
from tests.handoff_pair import DECODE, PREFILL, Pair, expected_tokens, until
from tests.handoff_requests import a_request
from tests.unit.test_handoff_breaks import Stalled
from workers.handoff.decode_role import DecodeRole, FencedError


class Later:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset


class Stand:
    """Decode in the midst of a transfer to 7 of its blocks, of which a call does not return."""

    def __init__(self, pair: Pair, stalled: Stalled, request: InferenceRequest) -> None:
        self.pair, self.stalled, self.request = pair, stalled, request
        role = pair.decode.role
        assert isinstance(role, DecodeRole)
        self.role = role
        self.clock = Later()
        self._heard_ms = 1_000_000
        self.pair.decode.fleet.watch_as("worker", DECODE.slot, DECODE.epoch)

    def beats(self, *runs: Run, count: int = 12) -> None:
        """What decode hears for so many tenths of a second."""
        for _ in range(count):
            self._heard_ms += 100
            for run in (DECODE, *runs):
                beat = Heartbeat("worker", run.slot, run.epoch, b"")
                self.pair.decode.fleet.on_heartbeat(beat, self._heard_ms)
            self.role.on_fleet_change()

    async def is_served(self) -> None:
        await self.pair.end(self.request)
        assert self.pair.decode.told(self.request) == expected_tokens(self.request, 12)

    def keeps(self, seconds: float) -> None:
        """All the time that passes, though decode looks at its clock."""
        for _ in range(10):
            self.clock.offset += seconds / 10
            self.role.on_fleet_change()
            self.role._tick()
            assert self.role.num_fenced_blocks == 7
            assert not self.pair.decode.all_free

    async def frees(self) -> None:
        await until(lambda: self.pair.decode.all_free)
        assert self.role.num_fenced_blocks == 0


@asynccontextmanager
async def stand(num_blocks: int = 16) -> AsyncIterator[Stand]:
    stalled = Stalled()
    async with Pair(network=stalled.network, decode_blocks=num_blocks) as pair:
        request = a_request(prompt_len=100)
        made = Stand(pair, stalled, request)
        made.role._decode.landing_s = 0.3
        made.beats(PREFILL, count=3)
        pair.hand_over(request, lease_ms=30_000)
        await until(stalled.begun.is_set)
        made.role._clock = made.clock
        try:
            yield made
        finally:
            stalled.go.set()


async def test_a_silent_run_s_blocks_wait_until_it_goes_on_and_the_stream_does_not() -> None:
    async with stand() as made:
        made.beats()
        await made.is_served()
        made.keeps(3600.0)
        made.beats(PREFILL)
        made.stalled.go.set()
        await made.frees()


async def test_a_silent_run_s_blocks_wait_until_it_is_said_to_have_left() -> None:
    async with stand() as made:
        made.beats()
        await made.is_served()
        made.keeps(3600.0)
        made.pair.wire.roles.pop(PREFILL.slot)
        made.pair.decode.hears_left(PREFILL)
        await made.frees()


async def test_a_run_that_another_one_follows_is_thought_to_be_over_a_while_later() -> None:
    async with stand() as made:
        made.pair.wire.roles.pop(PREFILL.slot)
        made.beats(Run(PREFILL.slot, PREFILL.epoch + 20))
        await made.is_served()
        made.keeps(29.0)
        made.clock.offset += 1.5
        made.role.on_fleet_change()
        await made.frees()


async def test_a_run_that_left_after_another_had_followed_it_is_over_at_once() -> None:
    async with stand() as made:
        made.pair.wire.roles.pop(PREFILL.slot)
        made.beats(Run(PREFILL.slot, PREFILL.epoch + 20))
        await made.is_served()
        made.pair.decode.serving.on_fleet_event(Left("worker", PREFILL.slot, PREFILL.epoch, "exit 1"), 1000)
        await made.frees()


@pytest.mark.parametrize(("num_blocks", "ends"), [(16, False), (13, True)])
async def test_a_run_most_of_whose_pool_waits_for_the_unheard_ends_after_a_while(
    num_blocks: int, ends: bool
) -> None:
    async with stand(num_blocks) as made:
        made.beats()
        if ends:  # there is no room to compute it beside
            await until(lambda: made.role.num_fenced_blocks == 7)
        else:
            await made.is_served()
        made.role.check(made.clock() + 100)
        if not ends:
            made.role.check(made.clock() + 200)
            return
        with pytest.raises(FencedError, match="7 of 13 blocks wait"):
            made.role.check(made.clock() + 200)
