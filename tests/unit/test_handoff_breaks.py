"""Handoffs that end early, wherever they stand: cancelled, by a death, a failing transport or a canary."""

import asyncio
import threading
import time

import pytest

from schemas.fleet import LEFT_CANARY_FAILED
from schemas.records import Handoff, InferenceRequest, Left, Offer, Reserved, TransferEnded
from tests.handoff_pair import DECODE, PREFILL, Pair, expected_tokens, until
from tests.handoff_requests import a_request, is_served
from workers.handoff.memory_transport import Fault, MemoryNetwork
from workers.handoff.transport import Copy

STEP_MS = 5.0
# One step, and what the issue allows beside it; and what a busy test machine takes for threads to wake.
FREE_S = STEP_MS / 1000 + 0.010
NOISE_S = 0.040
MESSAGES: list[type] = [Offer, Reserved, Handoff, TransferEnded]


class Stalled:
    """A network whose writes wait until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.network = MemoryNetwork(self._fault)

    def _fault(self, copy: Copy) -> Fault:
        self.begun.set()
        assert self.go.wait(10)
        return Fault.NONE


async def _stand_at(pair: Pair, request: InferenceRequest, message: type) -> None:
    pair.wire.holds.add(message)
    pair.hand_over(request)
    await until(lambda: bool(pair.wire.held))


@pytest.mark.parametrize("message", MESSAGES)
async def test_a_cancelled_request_ends_at_once_and_frees_all_blocks(message: type) -> None:
    """`message` is on its way when the cancellation comes, and arrives after it."""
    async with Pair(step_ms=STEP_MS) as pair:
        request = a_request(max_tokens=500)
        await _stand_at(pair, request, message)
        pair.cancel(request)
        pair.wire.release()
        seconds = await until(lambda: pair.prefill.all_free and pair.decode.all_free)
        assert seconds < FREE_S + NOISE_S
        end = await pair.end(request)
        assert end.finish_reason == "cancelled"
        told = pair.decode.told(request)
        assert told == expected_tokens(request, len(told))
        assert end.output_tokens == len(told)


async def test_a_request_that_is_cancelled_while_it_is_computed_or_written() -> None:
    stalled = Stalled()
    async with Pair(step_ms=STEP_MS, network=stalled.network) as pair:
        request = a_request(max_tokens=60, prompt_len=900)
        pair.hand_over(request)
        await until(stalled.begun.is_set)
        pair.cancel(request)
        end = await pair.end(request)
        assert (end.finish_reason, pair.decode.told(request)) == ("cancelled", [])
        await asyncio.sleep(0.1)
        # A call runs: nobody gets blocks that it may read or write.
        assert not pair.prefill.all_free
        assert not pair.decode.all_free
        stalled.go.set()
        assert await until(lambda: pair.prefill.all_free and pair.decode.all_free) < FREE_S + NOISE_S


async def test_decode_hears_of_the_cancellation_first_or_prefill() -> None:
    async with Pair() as pair:
        for first in (pair.prefill, pair.decode):
            request = a_request(max_tokens=500)
            await _stand_at(pair, request, Handoff)
            pair.cancel(request, first)
            await asyncio.sleep(0.02)
            pair.cancel(request)
            pair.wire.release()
            assert (await pair.end(request)).finish_reason == "cancelled"
            await until(lambda: pair.prefill.all_free and pair.decode.all_free)


async def test_a_request_that_was_cancelled_before_it_came() -> None:
    async with Pair() as pair:
        request = a_request()
        pair.cancel(request)
        pair.hand_over(request)
        assert (await pair.end(request)).finish_reason == "cancelled"
        await until(lambda: pair.prefill.all_free and pair.decode.all_free)


@pytest.mark.parametrize("message", [Reserved, Handoff, TransferEnded])
async def test_prefill_dies_and_the_stream_goes_on(message: type) -> None:
    async with Pair() as pair:
        pair.decode.role._decode.landing_s = 0.2  # type: ignore[attr-defined]
        request = a_request()
        await _stand_at(pair, request, message)
        pair.wire.roles.pop(PREFILL.slot)
        pair.wire.held.clear()
        pair.decode.hears_left(PREFILL)
        await pair.end(request)
        assert pair.decode.told(request) == expected_tokens(request, 12)
        await until(lambda: pair.decode.all_free)
        outcome = "adopted" if message is TransferEnded else "recomputed"
        assert pair.decode.role.counts == {outcome: 1}


@pytest.mark.parametrize("message", MESSAGES)
async def test_decode_dies_and_prefill_keeps_nothing(message: type) -> None:
    async with Pair() as pair:
        request = a_request()
        await _stand_at(pair, request, message)
        pair.wire.roles.pop(DECODE.slot)
        pair.wire.held.clear()
        pair.prefill.hears_left(DECODE)
        await until(lambda: pair.prefill.all_free)


async def test_blocks_that_a_dead_run_may_still_write_to_are_kept_until_nothing_lands() -> None:
    stalled = Stalled()
    async with Pair(network=stalled.network) as pair:
        pair.decode.role._decode.landing_s = 0.5  # type: ignore[attr-defined]
        request = a_request()
        pair.hand_over(request)
        await until(stalled.begun.is_set)
        pair.wire.roles.pop(PREFILL.slot)
        began = time.monotonic()
        pair.decode.hears_left(PREFILL)
        await pair.end(request)
        assert pair.decode.told(request) == expected_tokens(request, 12)
        await until(lambda: pair.decode.all_free)
        assert time.monotonic() - began >= 0.5
        stalled.go.set()


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.FAILS_LANDED, Fault.LOST, Fault.FLIPPED])
async def test_what_the_transport_does_is_nothing_that_a_stream_shows(fault: Fault) -> None:
    copies = 0

    def every_fifth(copy: Copy) -> Fault:
        nonlocal copies
        copies += 1
        return fault if copies % 5 == 0 else Fault.NONE

    async with Pair(network=MemoryNetwork(every_fifth)) as pair:
        pair.decode.role._decode.landing_s = 0.1  # type: ignore[attr-defined]
        requests = [a_request(number, prompt_len=16 + number) for number in range(6)]
        for request in requests:
            pair.hand_over(request)
        for request in requests:
            await is_served(pair, request)
        assert pair.decode.role.counts["recomputed"] > 0


async def test_a_canary_that_fails_at_prefill_gives_decode_nothing_to_believe() -> None:
    async with Pair() as pair:
        request = a_request()
        await _stand_at(pair, request, Handoff)
        pair.prefill.role.halt()
        pair.decode.fleet.on_event(Left("worker", PREFILL.slot, PREFILL.epoch, LEFT_CANARY_FAILED), 1000)
        pair.wire.release()
        await pair.end(request)
        assert pair.decode.told(request) == expected_tokens(request, 12)
        assert pair.decode.role.counts == {"recomputed": 1}


async def test_an_attempt_that_is_higher_takes_the_place_of_one_on_its_way() -> None:
    async with Pair() as pair:
        request = a_request()
        await _stand_at(pair, request, Handoff)
        again = a_request(attempt=2)
        again.request_id = request.request_id
        pair.wire.release()
        pair.hand_over(again)
        await until(lambda: any(end.attempt == 2 for end in pair.decode.ends(request)))
        assert pair.decode.told(again)[-12:] == expected_tokens(again, 12)
        await until(lambda: pair.prefill.all_free and pair.decode.all_free)
