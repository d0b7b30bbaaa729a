"""A prefill run whose canary fails after it has handed over: streams that go on from its KV end as those of a
run that computes wrong, with all that shares it; what its canary has vouched for since goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from schemas.fleet import LEFT_CANARY_FAILED
from schemas.records import Dispatch, Heartbeat, InferenceRequest, Left, WorkerStatus
from schemas.stream_state import Run
from tests.fleet_driver import worker_status
from tests.handoff_pair import DECODE, PREFILL, Pair, expected_tokens, until
from tests.handoff_requests import a_request
from workers.canary import CANARY_REQUEST_ID, NO_CANARY, Canary
from workers.handoff.vouching import Vouching
from workers.live_requests import LiveRequest
from workers.simulated_runner import SimulatedRunner

KNOWN = [SimulatedRunner(vocab_size=127, first_token_id=32).token_at(CANARY_REQUEST_ID, p) for p in range(3)]


class DoubtPair:
    """Prefill runs a canary when it is told to; decode hears prefill's heartbeats when it is told to."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._watch = pair.prefill.serving._watch
        self._watch._canary = Canary([65], KNOWN)
        self._beat_ms = 1_000_000

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.pair.decode.role.counts)

    async def run_canary(self) -> None:
        passed = self._watch.canary_passed
        self._watch.start_canary()
        await until(lambda: self._watch.canary_passed > passed)
        self.beat("ok")

    def beat(self, canary: str) -> None:
        self._beat_ms += 100
        status: WorkerStatus = replace(
            worker_status("simulated"), canary=canary, canary_passed=self._watch.canary_passed
        )
        beat = Heartbeat("worker", PREFILL.slot, PREFILL.epoch, b"", worker=status)
        self.pair.decode.fleet.on_heartbeat(beat, self._beat_ms)
        self.pair.decode.role.on_fleet_change()

    async def stream(self, number: int, **fields: object) -> InferenceRequest:
        """One that came from prefill, and goes on."""
        request = a_request(number, max_tokens=500, **fields)
        adopted = self.counts.get("adopted", 0)
        self.pair.hand_over(request)
        await until(
            lambda: self.counts.get("adopted", 0) > adopted and len(self.pair.decode.told(request)) > 2
        )
        return request

    async def stream_of_decode(self, number: int, **fields: object) -> InferenceRequest:
        """One that decode computes alone, and goes on."""
        request = a_request(number, max_tokens=500, **fields)
        dispatch = Dispatch(DECODE.slot, DECODE.epoch, 500, request)
        self.pair.decode.serving.on_dispatch(dispatch, None)
        await until(lambda: len(self.pair.decode.told(request)) > 2)
        return request

    async def is_disowned(self, request: InferenceRequest) -> None:
        end = await self.pair.end(request)
        told = self.pair.decode.told(request)
        assert (end.finish_reason, end.output_tokens) == ("engine_fault", len(told))
        assert told == expected_tokens(request, len(told))
        [row] = self.pair.decode.rows(request)
        assert (row.finish_reason, row.sealed) == ("engine_fault", False)

    async def goes_on(self, request: InferenceRequest) -> None:
        told = len(self.pair.decode.told(request))
        await until(lambda: len(self.pair.decode.told(request)) > told + 3)
        assert not self.pair.decode.ends(request)
        self.pair.cancel(request)
        await self.pair.end(request)


@asynccontextmanager
async def doubting(sharing: str = "off", **options: int) -> AsyncIterator[DoubtPair]:
    async with Pair(sharing=sharing, step_ms=2.0, decode_blocks=256, **options) as pair:  # type: ignore[arg-type]
        yield DoubtPair(pair)
        await until(lambda: pair.decode.all_free)


@pytest.mark.parametrize("word", ["heartbeat", "left"])
async def test_what_was_taken_since_the_last_good_canary_ends_and_what_came_before_goes_on(word: str) -> None:
    async with doubting() as doubt:
        vouched = await doubt.stream(1)
        await doubt.run_canary()
        taken = await doubt.stream(2)
        doubt.beat("ok")  # of the canary that ran before
        if word == "heartbeat":
            doubt.beat("failed")
        else:
            left = Left("worker", PREFILL.slot, PREFILL.epoch, LEFT_CANARY_FAILED)
            doubt.pair.decode.serving.on_fleet_event(left, 1000)
        await doubt.is_disowned(taken)
        await doubt.goes_on(vouched)
        assert doubt.counts["doubted"] == 1


async def test_a_run_that_dies_otherwise_leaves_no_doubt() -> None:
    async with doubting() as doubt:
        taken = await doubt.stream(1)
        doubt.pair.decode.hears_left(PREFILL)
        await doubt.goes_on(taken)
        assert "doubted" not in doubt.counts


async def test_one_that_runs_no_canary_is_never_doubted() -> None:
    async with doubting() as doubt:
        doubt._watch._canary = None
        taken = await doubt.stream(1)
        doubt.beat("failed")
        await doubt.goes_on(taken)


async def test_who_shares_what_was_taken_ends_too_and_the_cache_forgets_it() -> None:
    async with doubting("shared") as doubt:
        decode = doubt.pair.decode
        own = await doubt.stream_of_decode(7, prompt_len=40)
        taken = await doubt.stream(1, prompt_len=100)
        hits = decode.engine.kv_cache_manager.prefix_cache_hits
        sharer = await doubt.stream_of_decode(1, prompt_len=100)
        assert decode.engine.kv_cache_manager.prefix_cache_hits == hits + 96
        # One has ended, and what it had would be found.
        ended = await doubt.stream(3, prompt_len=64)
        doubt.pair.cancel(ended)
        await doubt.pair.end(ended)
        doubt.beat("failed")
        await doubt.is_disowned(taken)
        await doubt.is_disowned(sharer)
        for number in (1, 3):
            again = a_request(number, prompt_len=64)
            decode.serving.on_dispatch(Dispatch(DECODE.slot, DECODE.epoch, 12, again), None)
            await doubt.pair.end(again)
            assert decode.rows(again)[0].cached_tokens == 0
        await doubt.goes_on(own)


async def test_what_waits_to_be_adopted_is_computed_here() -> None:
    """Its bytes are there and right, but it is not prepared yet."""
    async with doubting() as doubt:
        decode = doubt.pair.decode
        prepare = decode.serving.prepare
        prepared: list[LiveRequest] = []
        decode.serving.prepare = prepared.append  # type: ignore[method-assign,assignment]
        request = a_request(1)
        doubt.pair.hand_over(request)
        await until(lambda: doubt.counts.get("adopted") == 1)
        doubt.beat("failed")
        [live] = prepared
        prepare(live)
        await doubt.pair.end(request)
        assert decode.told(request) == expected_tokens(request, 12)
        assert decode.rows(request)[0].cached_tokens == 0


def test_vouching() -> None:
    vouching, peer, other = Vouching(), Run(0, 1), Run(1, 2)
    vouching.take(b"a", peer, 3)
    vouching.take(b"b", peer, 4)
    vouching.take(b"c", other, 0)
    vouching.take(b"d", Run(2, 3), NO_CANARY)
    assert vouching.peers() == [peer, other]
    assert vouching.passed(peer, 3) == []  # it had begun when `a` was computed
    assert vouching.passed(peer, 4) == [b"a"]
    assert vouching.over(peer) == [b"b"]
    assert vouching.over(peer) == []
    assert vouching.passed(other, 1) == [b"c"]
    assert vouching.peers() == []
