"""Prompts that have a beginning in common are computed once, also while they are being computed."""

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import check_invariants, make_request, make_scheduler
from workers.batch import RunnerOutput, SchedulerOutput
from workers.request import Request
from workers.scheduler import Scheduler

INTERACTIVE, FREE, BATCH = PriorityClass


def step(scheduler: Scheduler, blocked: frozenset[int] = frozenset()) -> SchedulerOutput:
    batch = scheduler.schedule(blocked)
    sampled = [7 if s.samples else None for s in batch.scheduled]
    scheduler.update_from_output(batch, RunnerOutput(sampled))
    return batch


def spans(batch: SchedulerOutput) -> list[tuple[Request, int]]:
    return [(s.request, s.num_scheduled_tokens) for s in batch.scheduled]


def test_a_second_prompt_computes_only_what_the_first_did_not() -> None:
    scheduler = make_scheduler(sharing="tenant")
    first = make_request(1, prompt_token_ids=[5] * 40, max_tokens=9)
    scheduler.add_request(first)
    step(scheduler)
    second = make_request(2, prompt_token_ids=[5] * 40 + [6] * 8, max_tokens=2)
    scheduler.add_request(second)
    assert spans(step(scheduler)) == [(first, 1), (second, 16)]
    assert second.block_table[:2] == first.block_table[:2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    kv = scheduler.kv_cache_manager
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (88, 32)
    check_invariants(scheduler, [first, second])


def test_siblings_wait_for_the_one_that_computes_their_prompt_and_then_share_it() -> None:
    scheduler = make_scheduler(sharing="tenant", max_prefill_chunk=64)
    siblings = [make_request(n, prompt_token_ids=[5] * 200, max_tokens=20) for n in (1, 2, 3)]
    for request in siblings:
        scheduler.add_request(request)
    for num_tokens in (64, 64, 64, 8):
        assert spans(step(scheduler))[:1] == [(siblings[0], num_tokens)]
        check_invariants(scheduler, siblings)
    # By then more than half of what they lack is theirs to take.
    while scheduler.num_waiting:
        step(scheduler)
    assert [r.num_cached_tokens >= 128 for r in siblings] == [False, True, True]
    assert len({tuple(r.block_table[:8]) for r in siblings}) == 1
    assert sum(len(r.prompt_token_ids) - r.num_cached_tokens for r in siblings) < 2 * 200


@pytest.mark.parametrize(
    ("tenants", "num_shared", "num_admitted"),
    [(("a", "a"), 96, 1), (("a", "b"), 96, 2), (("a", "a"), 16, 2)],
    ids=["half in common", "another tenant", "little in common"],
)
def test_who_waits_for_another_ones_prompt(
    tenants: tuple[str, str], num_shared: int, num_admitted: int
) -> None:
    scheduler = make_scheduler(sharing="tenant")
    for number, tenant in enumerate(tenants):
        prompt = [5] * num_shared + [6 + number] * (150 - num_shared)
        scheduler.add_request(make_request(number, prompt_token_ids=prompt, tenant=tenant))
    assert len(step(scheduler).admitted) == num_admitted
    assert len(step(scheduler).admitted) == 2 - num_admitted


def test_who_is_passed_over_holds_nobody_up() -> None:
    scheduler = make_scheduler(sharing="tenant", max_num_seqs=8)
    first, sibling = (make_request(n, prompt_token_ids=[5] * 64) for n in (1, 2))
    other = make_request(3, prompt_token_ids=[6] * 64)
    lower = make_request(4, prompt_token_ids=[7] * 64, priority=BATCH)
    for request in (first, sibling, other, lower):
        scheduler.add_request(request)
    assert step(scheduler).admitted == [first, other, lower]
    assert step(scheduler).admitted == [sibling]


def test_nobody_waits_for_a_prompt_that_stands_still() -> None:
    scheduler = make_scheduler(sharing="tenant", max_prefill_chunk=32)
    first = make_request(1, prompt_token_ids=[5] * 128, reply_partition=1)
    sibling = make_request(2, prompt_token_ids=[5] * 128)
    for request in (first, sibling):
        scheduler.add_request(request)
    assert step(scheduler).admitted == [first]
    batch = step(scheduler, frozenset({1}))
    assert batch.admitted == [sibling]
    assert sibling.num_cached_tokens == 32


def test_hits_after_a_preemption_are_not_the_requests_cached_tokens() -> None:
    scheduler = make_scheduler(sharing="tenant", max_num_seqs=1)
    request = make_request(1, prompt_token_ids=[5] * 64, max_tokens=20, priority=BATCH)
    scheduler.add_request(request)
    step(scheduler)
    scheduler.add_request(make_request(2, prompt_len=8, max_tokens=1))
    assert [p.num_tokens_lost for p in step(scheduler).preempted] == [64]
    batch = step(scheduler)
    # All of its prompt, for now the last token is an output token.
    assert spans(batch) == [(request, 1)]
    assert request.num_cached_tokens == 0
    assert scheduler.kv_cache_manager.prefix_cache_hits == 0


def test_a_resumed_request_counts_cached_tokens_of_its_prompt_alone() -> None:
    scheduler = make_scheduler(sharing="tenant")
    first = make_request(1, prompt_token_ids=[5] * 16, max_tokens=40)
    scheduler.add_request(first)
    for _ in range(36):
        step(scheduler)
    resumed = make_request(1, attempt=2, prompt_token_ids=[5] * 16, max_tokens=40, output_token_ids=[7] * 34)
    scheduler.add_request(resumed)
    step(scheduler)
    assert resumed.num_computed_tokens == 50
    assert resumed.num_cached_tokens == 16
