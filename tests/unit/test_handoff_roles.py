"""Handoffs between two workers' real engines: what is served is what one worker would serve alone."""

import threading

import pytest

from schemas.records import Dispatch, Handoff, Offer
from tests.handoff_pair import DECODE, PREFILL, Pair, expected_tokens, until
from tests.handoff_requests import a_request, is_served
from workers.request import RequestOutput


async def test_a_prompt_is_computed_here_and_goes_on_there() -> None:
    async with Pair() as pair:
        request = a_request()
        pair.hand_over(request)
        await is_served(pair, request)
        assert pair.decode.role.counts == {"adopted": 1}
        assert pair.prefill.role.counts == {"written": 1}
        assert pair.prefill.role.bytes_per_s > 0


async def test_many_at_once() -> None:
    async with Pair(prefill_limits={"max_num_batched_tokens": 64}, prefill_blocks=20) as pair:
        requests = [a_request(number, prompt_len=20 + 13 * number) for number in range(12)]
        for request in requests:
            pair.hand_over(request)
        for request in requests:
            await is_served(pair, request)
        assert pair.decode.role.counts["adopted"] >= 10


@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
async def test_chunks_do_not_matter(chunk: int) -> None:
    async with Pair(prefill_limits={"max_prefill_chunk": chunk}, step_ms=0.2) as pair:
        for length in (1, 15, 16, 17, 33):
            request = a_request(length, prompt_len=length)
            pair.hand_over(request)
            await is_served(pair, request)
        assert pair.decode.role.counts == {"adopted": 5}


async def test_prefix_hits_on_either_side_do_not_matter() -> None:
    async with Pair(sharing="shared") as pair:
        first = a_request()
        pair.hand_over(first)
        await is_served(pair, first)
        assert pair.prefill.engine.kv_cache_manager.prefix_cache_hits == 0
        # Both have the first six blocks now: prefill computes four tokens, one block is written.
        before = pair.prefill.role.writer.counters.num_bytes  # type: ignore[attr-defined]
        second = a_request()
        pair.hand_over(second)
        await is_served(pair, second)
        assert pair.decode.rows(second)[0].cached_tokens == 96
        written = pair.prefill.role.writer.counters.num_bytes - before  # type: ignore[attr-defined]
        assert written == 4 * 16
        # Decode alone has it.
        pair.prefill.engine.pool.free(pair.prefill.engine.pool.allocate(64))
        third = a_request()
        pair.hand_over(third)
        await is_served(pair, third)
        # Prefill alone has it.
        pair.decode.engine.pool.free(pair.decode.engine.pool.allocate(64))
        fourth = a_request()
        pair.hand_over(fourth)
        await is_served(pair, fourth)
        assert pair.decode.role.counts == {"adopted": 4}


async def test_a_resumed_request_goes_on_at_its_position() -> None:
    async with Pair() as pair:
        request = a_request(attempt=2)
        request.output_token_ids = expected_tokens(request, 5)
        pair.hand_over(request)
        end = await pair.end(request)
        assert pair.decode.told(request) == expected_tokens(request, 7)
        assert end.output_tokens == 12


async def test_a_first_token_may_be_the_last() -> None:
    async with Pair() as pair:
        request = a_request(max_tokens=1)
        pair.hand_over(request)
        await is_served(pair, request, 1)


async def test_a_prompt_that_is_preempted_is_computed_by_decode() -> None:
    """A stream that runs whole at prefill needs the block that the prompt, which is last, holds."""
    limits = {"max_num_batched_tokens": 8, "max_prefill_chunk": 8, "max_num_seqs": 4}
    async with Pair(prefill_blocks=11, prefill_limits=limits) as pair:
        whole, prompt = a_request(1, prompt_len=47, max_tokens=40), a_request(2, prompt_len=120)
        # Both before the first step, so that the prompt begins with the stream's first token.
        may_go = threading.Event()

        def wait() -> list[RequestOutput]:
            assert may_go.wait(10)
            return []

        pair.prefill.thread.call(wait)
        pair.prefill.serving.on_dispatch(Dispatch(PREFILL.slot, PREFILL.epoch, 1, whole), None)
        pair.hand_over(prompt)
        await until(lambda: any(isinstance(message, Offer) for message in pair.wire.sent))
        may_go.set()
        end = await pair.end(prompt)
        assert end.output_tokens == 12
        assert pair.decode.told(prompt) == expected_tokens(prompt, 12)
        await until(lambda: bool(pair.prefill.ends(whole)))
        assert pair.prefill.told(whole) == expected_tokens(whole, 40)
        assert pair.prefill.engine.scheduler.num_preemptions == 1
        assert pair.decode.role.counts == {"recomputed": 1}
        await until(lambda: pair.prefill.all_free and pair.decode.all_free)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize(
    ("decode_blocks", "outcomes"),
    # Blocks of lower classes are the scheduler's to give.
    [(20, {"adopted": 2}), (18, {"adopted": 1, "recomputed": 1})],
)
async def test_a_stream_that_is_preempted_at_decode_goes_on(
    decode_blocks: int, outcomes: dict[str, int], num_host_blocks: int
) -> None:
    # Slow enough for the second to come while the first runs, on a busy machine too.
    async with Pair(step_ms=10, decode_blocks=decode_blocks, num_host_blocks=num_host_blocks) as pair:
        low, high = a_request(1, priority=1, max_tokens=60), a_request(2, prompt_len=200, max_tokens=60)
        pair.hand_over(low)
        await until(lambda: len(pair.decode.told(low)) > 1)
        pair.hand_over(high)
        for request in (low, high):
            await is_served(pair, request, 60)
        assert pair.decode.engine.scheduler.num_preemptions == 1
        assert pair.decode.role.counts == outcomes


async def test_all_places_taken_it_waits_as_others_do_and_finds_its_kv() -> None:
    async with Pair(step_ms=10, sharing="shared", decode_limits={"max_num_seqs": 1}) as pair:
        first, second = a_request(1, max_tokens=60), a_request(2)
        pair.hand_over(first)
        await until(lambda: len(pair.decode.told(first)) > 1)
        pair.hand_over(second)
        await is_served(pair, first, 60)
        await is_served(pair, second)
        assert pair.decode.role.counts == {"adopted": 2}
        assert pair.decode.engine.kv_cache_manager.prefix_cache_hits >= 96


async def test_without_blocks_decode_waits_for_some_and_then_computes_it() -> None:
    async with Pair(step_ms=10, decode_blocks=12) as pair:
        first, second = a_request(1, max_tokens=60), a_request(2)
        pair.hand_over(first)
        await until(lambda: len(pair.decode.told(first)) > 1)
        pair.hand_over(second, reserve_ms=20)
        await is_served(pair, first, 60)
        await is_served(pair, second)
        assert pair.decode.role.counts == {"adopted": 1, "recomputed": 1}


async def test_what_cannot_run_is_told_by_decode() -> None:
    async with Pair() as pair:
        request = a_request(max_tokens=4000)
        pair.hand_over(request)
        end = await pair.end(request)
        assert end.finish_reason == "error"
        assert "blocks" in (end.message or "")
        request = a_request()
        request.sampling.temperature = -1.0
        pair.hand_over(request)
        end = await pair.end(request)
        assert (end.finish_reason, (end.message or "")[:11]) == ("error", "temperature")
        await until(lambda: pair.prefill.all_free and pair.decode.all_free)


async def test_lost_messages_cost_time_and_nothing_else() -> None:
    async with Pair() as pair:
        pair.wire.drops.add(Handoff)
        request = a_request()
        pair.hand_over(request, reserve_ms=50, lease_ms=150)
        await is_served(pair, request)
        assert pair.decode.role.counts == {"recomputed": 1}


async def test_a_run_that_is_known_to_be_over_gets_no_offer() -> None:
    async with Pair() as pair:
        pair.prefill.hears_left(DECODE)
        pair.hand_over(a_request())
        await until(lambda: pair.prefill.all_free)
        assert not any(type(m).__name__ == "Offer" for m in pair.wire.sent)
        pair.decode.hears_left(PREFILL)
