"""Who gives way, in which mode, and what is said about it."""

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import EOS, check_invariants, make_config, make_kv, make_request, make_scheduler
from tests.kv_checking_runner import KVCheckingRunner
from workers.batch import PreemptionMode, PreemptionReason, RunnerOutput, SchedulerOutput
from workers.engine import Engine
from workers.preemption import SwapCost
from workers.request import Request, RequestStatus
from workers.scheduler import Scheduler

INTERACTIVE, FREE, BATCH = PriorityClass
RECOMPUTE, SWAP = PreemptionMode
NO_FREE_BLOCK, HIGHER_CLASS_BLOCKS, HIGHER_CLASS_SEQS = PreemptionReason


def step(scheduler: Scheduler) -> SchedulerOutput:
    batch = scheduler.schedule()
    sampled = [7 if s.samples else None for s in batch.scheduled]
    scheduler.update_from_output(batch, RunnerOutput(sampled))
    return batch


def two_of_which_one_must_give_way(
    num_host_blocks: int = 0, swap_bytes_per_s: float = 1e9
) -> tuple[Scheduler, Request, Request]:
    """Both outgrow what was expected of them: at the next step the first one needs another block."""
    scheduler = make_scheduler(
        num_blocks=4, num_host_blocks=num_host_blocks, swap_bytes_per_s=swap_bytes_per_s
    )
    first, second = (
        make_request(n, prompt_len=31, max_tokens=30, expected_output_tokens=1, priority=BATCH)
        for n in (1, 2)
    )
    for request in (first, second):
        scheduler.add_request(request)
    for _ in range(2):
        assert not step(scheduler).preempted
    return scheduler, first, second


def test_recompute_throws_the_kv_away_and_says_so() -> None:
    scheduler, first, second = two_of_which_one_must_give_way()
    (event,) = step(scheduler).preempted
    assert (event.victim, event.for_request) == (second, first)
    assert (event.reason, event.mode, event.num_tokens_lost) == (NO_FREE_BLOCK, RECOMPUTE, 32)
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert scheduler.preemptions == {(NO_FREE_BLOCK, RECOMPUTE): 1}
    check_invariants(scheduler, [first, second])


def test_what_is_computed_again_is_counted() -> None:
    scheduler, first, second = two_of_which_one_must_give_way()
    step(scheduler)
    assert second.num_recomputed_tokens == 0
    while second.status is not RequestStatus.RUNNING:
        batch = step(scheduler)
    assert batch.admitted == [second]
    assert (first.num_recomputed_tokens, second.num_recomputed_tokens) == (0, 32)


@pytest.mark.parametrize(("sharing", "cached"), [("off", 0), ("tenant", 16)])
def test_an_attempt_that_takes_over_computes_again_what_the_one_before_had(sharing: str, cached: int) -> None:
    """But for what the prefix cache has of it."""
    scheduler = make_scheduler(sharing=sharing)
    earlier = make_request(3, prompt_token_ids=[101] * 31, max_tokens=1)
    scheduler.add_request(earlier)
    while earlier.finish_reason is None:
        step(scheduler)
    resumed, new = (
        make_request(n, prompt_len=31, max_tokens=30, output_token_ids=output)
        for n, output in ((1, [5] * 9), (2, []))
    )
    for request in (resumed, new):
        scheduler.add_request(request)
    step(scheduler)
    assert (resumed.num_recomputed_tokens, new.num_recomputed_tokens) == (40 - cached, 0)


def test_swap_keeps_the_kv_and_brings_it_back() -> None:
    scheduler, first, second = two_of_which_one_must_give_way(num_host_blocks=4)
    table = list(second.block_table)
    batch = step(scheduler)
    (event,) = batch.preempted
    assert (event.victim, event.mode, event.num_tokens_lost) == (second, SWAP, 0)
    assert batch.swap_out == list(zip(table, second.host_block_table, strict=True))
    assert second.num_computed_tokens == 32
    host_table = list(second.host_block_table)
    while second.status is RequestStatus.PREEMPTED:
        batch = step(scheduler)
        check_invariants(scheduler, [first, second])
    assert batch.admitted == [second]
    assert [host for host, _ in batch.swap_in] == host_table
    assert [(s.request, s.num_scheduled_tokens, s.samples) for s in batch.scheduled] == [(second, 1, True)]


@pytest.mark.parametrize(
    ("num_host_blocks", "swap_bytes_per_s", "mode"),
    [(4, 1e9, SWAP), (2, 1e9, SWAP), (1, 1e9, RECOMPUTE), (4, 1e6, RECOMPUTE)],
)
def test_swap_needs_room_on_the_host_and_must_be_faster(
    num_host_blocks: int, swap_bytes_per_s: float, mode: PreemptionMode
) -> None:
    scheduler, _, _ = two_of_which_one_must_give_way(num_host_blocks, swap_bytes_per_s=swap_bytes_per_s)
    assert [p.mode for p in step(scheduler).preempted] == [mode]


def test_the_cost_model_compares_two_copies_with_a_prefill() -> None:
    cost = SwapCost(bytes_per_block=1_000_000, bytes_per_s=1e9)
    # 10 blocks out and in: 20 ms. 160 tokens at 8,000 tokens/s: 20 ms.
    assert not cost.swaps(160, 10, prefill_tokens_per_s=8001.0)
    assert cost.swaps(160, 10, prefill_tokens_per_s=7999.0)
    # Nothing measured yet: 1,000 tokens/s.
    assert cost.swaps(160, 10, prefill_tokens_per_s=0.0)


def test_a_request_that_was_swapped_out_gives_its_host_blocks_back_when_it_is_cancelled() -> None:
    scheduler, first, second = two_of_which_one_must_give_way(num_host_blocks=4)
    step(scheduler)
    scheduler.abort(second.request_id, second.attempt)
    host_pool = scheduler.kv_cache_manager.host_pool
    assert host_pool is not None
    assert host_pool.num_free_blocks == 4
    check_invariants(scheduler, [first, second])


def test_the_last_one_stands_still_with_what_it_has_until_there_is_room() -> None:
    scheduler, first, second = two_of_which_one_must_give_way()
    # The first one cannot ask for its block: its reply partition is blocked. The second is the last.
    first.reply_partition = 1
    for _ in range(3):
        batch = scheduler.schedule(frozenset({1}))
        assert (batch.scheduled, batch.preempted) == ([], [])
    assert second.status is RequestStatus.RUNNING
    assert second.num_computed_tokens == 32


@pytest.mark.parametrize("reason", [HIGHER_CLASS_SEQS, HIGHER_CLASS_BLOCKS])
def test_a_waiting_higher_class_says_what_it_took(reason: PreemptionReason) -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1 if reason is HIGHER_CLASS_SEQS else 8)
    batch = make_request(1, prompt_len=30, max_tokens=20, priority=BATCH)
    scheduler.add_request(batch)
    step(scheduler)
    urgent = make_request(2, prompt_len=60 if reason is HIGHER_CLASS_BLOCKS else 8, max_tokens=2)
    scheduler.add_request(urgent)
    (event,) = step(scheduler).preempted
    assert (event.victim, event.for_request, event.reason) == (batch, urgent, reason)


def test_as_few_as_it_takes_give_way_and_none_if_even_all_would_not_do() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=96)
    lower = [make_request(n, prompt_len=8, max_tokens=8, priority=BATCH) for n in (1, 2, 3)]
    for request in lower:
        scheduler.add_request(request)
    interactive = make_request(4, prompt_len=20, max_tokens=12)
    scheduler.add_request(interactive)
    step(scheduler)
    assert scheduler.num_running == 4
    # One free block, three of class batch: four.
    scheduler.add_request(make_request(5, prompt_len=70, max_tokens=2))
    assert step(scheduler).preempted == []
    scheduler.add_request(other := make_request(6, prompt_len=20, max_tokens=2))
    assert step(scheduler).preempted == [], "it arrived later than the one that waits"
    scheduler.abort(make_request(5).request_id, 1)
    batch = step(scheduler)
    assert [p.victim for p in batch.preempted] == [lower[2]]
    assert batch.admitted == [other]


def test_shared_blocks_free_nothing_until_the_last_sharer_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=9, sharing="tenant")
    prompt = [5] * 64
    siblings = [make_request(n, prompt_token_ids=prompt, max_tokens=8, priority=BATCH) for n in (1, 2, 3)]
    for request in siblings:
        scheduler.add_request(request)
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_running == 3
    # Three blocks of the prompt are shared, its last one and the one of the output are each one's own.
    assert scheduler.kv_cache_manager.num_free_blocks == 0
    urgent = make_request(4, prompt_token_ids=[6] * 60, max_tokens=2)
    scheduler.add_request(urgent)
    batch = step(scheduler)
    assert batch.admitted == [urgent]
    assert [p.victim for p in batch.preempted] == [siblings[2], siblings[1]]
    check_invariants(scheduler, [*siblings, urgent])


def test_a_host_block_that_is_copied_from_is_not_copied_to_in_the_same_step() -> None:
    runner = KVCheckingRunner(shared=False, unit_s=0.001)
    config = make_config(max_num_seqs=3, max_prefill_chunk=16)
    engine = Engine(config, runner, make_kv(5, num_host_blocks=1), {EOS}, clock=runner.clock)
    free = make_request(1, prompt_len=8, max_tokens=9, priority=FREE, reply_partition=7)
    engine.add_request(free)
    engine.step()
    for number in (2, 3, 4):
        engine.add_request(make_request(number, prompt_len=8, max_tokens=1))
    batch, _ = engine.step()
    assert [(p.victim, p.mode) for p in batch.preempted] == [(free, SWAP)]
    # While nobody takes its output, class batch fills the pool: the first one's prompt, and one to give way.
    long = make_request(5, prompt_len=64, max_tokens=1, priority=BATCH)
    last = make_request(6, prompt_len=8, max_tokens=9, priority=BATCH)
    for request in (long, last):
        engine.add_request(request)
    for _ in range(3):
        batch, _ = engine.step(frozenset({7}))
    assert engine.pool.num_free_blocks == 1
    batch, _ = engine.step()
    assert (batch.admitted, len(batch.swap_in)) == ([free], 1)
    assert [(p.victim, p.mode) for p in batch.preempted] == [(last, RECOMPUTE)]
    while engine.scheduler.has_requests:
        engine.step()
    assert len(free.output_token_ids) == len(last.output_token_ids) == 9
