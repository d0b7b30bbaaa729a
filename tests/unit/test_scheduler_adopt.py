"""A scheduler goes on with a request whose prompt another engine computed."""

from typing import Any

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import check_invariants, make_request, make_scheduler
from tests.unit.test_scheduler import spans, step
from workers.request import FinishReason, Request
from workers.scheduler import Scheduler


def handed_over(number: int = 1, prompt_len: int = 40, **fields: Any) -> Request:
    """With its first token."""
    request = make_request(number, prompt_len=prompt_len, **fields)
    request.output_token_ids.append(7)
    return request


def adopt(scheduler: Scheduler, request: Request) -> bool:
    kv = scheduler.kv_cache_manager
    blocks = kv.pool.allocate(kv.num_blocks_for(request.num_tokens - 1))
    taken = scheduler.adopt(request, blocks)
    if not taken:
        kv.pool.free(blocks)
    return taken


def test_it_decodes_from_its_second_token_on() -> None:
    scheduler = make_scheduler()
    request = handed_over(max_tokens=3)
    assert adopt(scheduler, request)
    check_invariants(scheduler, [request])
    assert spans(scheduler.schedule()) == [(request.request_id, 1, True)]
    scheduler = make_scheduler()
    request = handed_over(max_tokens=3)
    adopt(scheduler, request)
    outputs = [step(scheduler)[0] for _ in range(2)]
    assert [output.position for output in outputs] == [1, 2]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    check_invariants(scheduler, [request])


def test_what_came_with_it_is_found_by_others() -> None:
    scheduler = make_scheduler(sharing="shared")
    adopt(scheduler, handed_over(max_tokens=100))
    other = make_request(2, prompt_token_ids=[101] * 40)
    scheduler.add_request(other)
    step(scheduler)
    assert other.num_cached_tokens == 32


def test_it_waits_for_a_place_and_holds_its_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = handed_over(1, max_tokens=2), handed_over(2)
    assert adopt(scheduler, first)
    assert not adopt(scheduler, second)
    check_invariants(scheduler, [first])
    step(scheduler)
    assert adopt(scheduler, second)
    check_invariants(scheduler, [first, second])


def test_it_gives_way_like_any_other_and_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=6)
    batch = handed_over(1, max_tokens=20, priority=PriorityClass.BATCH)
    assert adopt(scheduler, batch)
    scheduler.add_request(make_request(2, prompt_len=60, max_tokens=4))
    step(scheduler)
    assert scheduler.num_preemptions == 1
    while scheduler.has_requests:
        step(scheduler)
    assert batch.output_token_ids == [7] * 20


def test_what_is_no_first_decode_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="blocks"):
        scheduler.adopt(handed_over(), [0])
    with pytest.raises(ValueError, match="first token"):
        scheduler.adopt(make_request(prompt_len=40), [0, 1, 2])
    known = handed_over()
    assert adopt(scheduler, known)
    with pytest.raises(ValueError, match="already"):
        adopt(scheduler, handed_over())
