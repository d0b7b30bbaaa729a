from typing import Any

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import (
    EOS,
    check_invariants,
    make_config,
    make_request,
    make_scheduler,
    request_id,
)
from workers.batch import RunnerOutput, SchedulerOutput
from workers.request import FinishReason, Request, RequestOutput, RequestStatus
from workers.scheduler import Scheduler

INTERACTIVE, FREE, BATCH = PriorityClass


def step(
    scheduler: Scheduler, token_id: int = 7, blocked: frozenset[int] = frozenset()
) -> list[RequestOutput]:
    return finish_step(scheduler, scheduler.schedule(blocked), token_id)


def finish_step(scheduler: Scheduler, batch: SchedulerOutput, token_id: int = 7) -> list[RequestOutput]:
    sampled = RunnerOutput([token_id if s.samples else None for s in batch.scheduled])
    return scheduler.update_from_output(batch, sampled)


def spans(batch: SchedulerOutput) -> list[tuple[bytes, int, bool]]:
    return [(s.request.request_id, s.num_scheduled_tokens, s.samples) for s in batch.scheduled]


def test_one_request_from_prompt_to_length() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt_len=20, max_tokens=3)
    assert scheduler.add_request(request) == []
    positions = []
    for _ in range(3):
        (output,) = step(scheduler)
        positions.append(output.position)
    assert positions == [0, 1, 2]
    assert output.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [7, 7, 7]
    assert not scheduler.has_requests
    check_invariants(scheduler, [request])


def test_a_long_prompt_goes_in_chunks_and_samples_at_its_end() -> None:
    scheduler = make_scheduler(max_prefill_chunk=512)
    scheduler.add_request(make_request(prompt_len=1100))
    seen = []
    for _ in range(3):
        batch = scheduler.schedule()
        seen += [(n, samples) for _, n, samples in spans(batch)]
        finish_step(scheduler, batch)
    assert seen == [(512, False), (512, False), (76, True)]


def test_decodes_go_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, max_num_seqs=8)
    scheduler.add_request(make_request(1, prompt_len=10))
    step(scheduler)
    scheduler.add_request(make_request(2, prompt_len=60))
    scheduler.add_request(make_request(3, prompt_len=60))
    batch = scheduler.schedule()
    assert spans(batch) == [
        (request_id(1), 1, True),
        (request_id(2), 60, True),
        (request_id(3), 39, False),
    ]
    assert batch.total_num_scheduled_tokens == 100


def test_prompt_chunks_go_in_class_order_even_before_a_started_lower_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_seqs=8)
    scheduler.add_request(make_request(1, prompt_len=200, priority=BATCH))
    step(scheduler)
    scheduler.add_request(make_request(2, prompt_len=40, priority=FREE))
    scheduler.add_request(make_request(3, prompt_len=40, priority=INTERACTIVE))
    batch = scheduler.schedule()
    assert spans(batch) == [(request_id(3), 40, True), (request_id(2), 24, False)]


def test_max_num_seqs_holds_and_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(n, priority=BATCH, max_tokens=50) for n in (1, 2, 3)]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler)
    assert [r.status for r in requests] == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
    ]
    requests.append(make_request(4, priority=INTERACTIVE))
    scheduler.add_request(requests[-1])
    batch = scheduler.schedule()
    assert [p.victim for p in batch.preempted] == [requests[1]]
    assert batch.admitted == [requests[3]]
    assert spans(batch) == [(request_id(1), 1, True), (request_id(4), 8, True)]
    assert batch.total_num_scheduled_tokens == 9
    finish_step(scheduler, batch)
    check_invariants(scheduler, requests)


def test_out_of_blocks_the_newest_of_the_lowest_class_gives_way_and_goes_on_later() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=4)
    first = make_request(1, prompt_len=15, max_tokens=30, expected_output_tokens=2)
    second = make_request(2, prompt_len=15, max_tokens=30, expected_output_tokens=2)
    scheduler.add_request(first)
    scheduler.add_request(second)
    preempted = []
    tokens = 0
    while scheduler.has_requests:
        batch = scheduler.schedule()
        preempted += [p.victim for p in batch.preempted]
        finish_step(scheduler, batch, token_id=10 + tokens)
        tokens += 1
        check_invariants(scheduler, [first, second])
        assert tokens < 200
    assert set(preempted) == {second}
    assert len(first.output_token_ids) == len(second.output_token_ids) == 30
    assert first.output_token_ids == list(range(10, 40))


def test_the_victim_is_of_the_lowest_class_even_if_it_runs_for_longer() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=4)
    batch_request = make_request(1, prompt_len=15, max_tokens=30, priority=BATCH)
    interactive = make_request(2, prompt_len=15, max_tokens=30, priority=INTERACTIVE)
    scheduler.add_request(batch_request)
    step(scheduler)
    scheduler.add_request(interactive)
    preempted = set()
    while scheduler.has_requests:
        batch = scheduler.schedule()
        preempted |= {p.victim for p in batch.preempted}
        finish_step(scheduler, batch)
    assert preempted == {batch_request}


def test_a_preempted_request_is_ahead_of_its_class() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=1)
    scheduler.add_request(make_request(1, priority=FREE, max_tokens=9))
    step(scheduler)
    scheduler.add_request(make_request(2, priority=FREE))
    scheduler.add_request(make_request(3, priority=INTERACTIVE, max_tokens=1))
    step(scheduler)
    batch = scheduler.schedule()
    assert [s.request.request_id for s in batch.scheduled] == [request_id(1)]


def test_a_waiting_higher_class_keeps_lower_ones_from_the_blocks_it_waits_for() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=4)
    scheduler.add_request(make_request(1, prompt_len=60, max_tokens=10))
    step(scheduler)
    scheduler.add_request(make_request(2, prompt_len=60, max_tokens=10))
    scheduler.add_request(make_request(3, prompt_len=4, max_tokens=2, priority=BATCH))
    step(scheduler)
    assert scheduler.num_running == 1
    assert scheduler.num_waiting_by_class() == (1, 0, 1)


def test_blocked_partitions_stand_still_and_hold_nobody_else_up() -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    for number, partition in ((1, 5), (2, 6)):
        scheduler.add_request(make_request(number, reply_partition=partition))
    step(scheduler)
    for number, partition in ((3, 5), (4, 6)):
        scheduler.add_request(make_request(number, reply_partition=partition))
    batch = scheduler.schedule(frozenset({5}))
    assert [s.request.request_id for s in batch.scheduled] == [request_id(2), request_id(4)]
    finish_step(scheduler, batch)
    assert len(scheduler.schedule().scheduled) == 4


@pytest.mark.parametrize(
    ("sampling", "token_id", "reason"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"stop_token_ids": [9]}, 9, FinishReason.STOP),
        ({"stop_token_ids": [9], "ignore_eos": True}, 9, FinishReason.STOP),
        ({}, 9, None),
    ],
)
def test_end_tokens(sampling: dict[str, Any], token_id: int, reason: FinishReason | None) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(max_tokens=5, **sampling))
    (output,) = step(scheduler, token_id)
    assert output.token_ids == [token_id]
    assert output.finish_reason == reason


def test_the_context_ends_a_request() -> None:
    scheduler = make_scheduler(max_model_len=10)
    request = make_request(prompt_len=8, max_tokens=100)
    scheduler.add_request(request)
    assert step(scheduler)[0].finish_reason is None
    assert step(scheduler)[0].finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 10


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt_len=0), "prompt_token_ids is empty"),
        (make_request(prompt_len=512), "the prompt has 512 tokens, the model's context is 512"),
        (make_request(prompt_len=100, max_tokens=30), "need 9 KV blocks, the worker has 8"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(request_: Request, message: str) -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=512)
    (output,) = scheduler.add_request(request_)
    assert output.finish_reason is FinishReason.ERROR
    assert message in output.error
    assert not scheduler.has_requests


def test_the_last_token_needs_no_block() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=512)
    request = make_request(prompt_len=100, max_tokens=29)
    assert scheduler.add_request(request) == []
    while scheduler.has_requests:
        step(scheduler)
    assert len(request.output_token_ids) == 29


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_num_waiting=2)
    outputs = [scheduler.add_request(make_request(n)) for n in (1, 2, 3)]
    assert outputs[:2] == [[], []]
    assert outputs[2][0].error == "2 requests wait already"
    assert scheduler.num_waiting == 2


def test_abort_frees_the_blocks_at_once_and_covers_lower_attempts() -> None:
    scheduler = make_scheduler()
    request = make_request(attempt=2)
    scheduler.add_request(request)
    step(scheduler)
    assert scheduler.abort(request_id(1), 1) is None
    output = scheduler.abort(request_id(1), 2)
    assert output is not None
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.position == 1
    check_invariants(scheduler, [request])
    assert scheduler.abort(request_id(1), 2) is None


def test_a_higher_attempt_replaces_a_lower_one_and_no_other_does() -> None:
    scheduler = make_scheduler()
    first, same, second = make_request(), make_request(), make_request(attempt=2, output_token_ids=[5, 6])
    scheduler.add_request(first)
    step(scheduler)
    assert scheduler.add_request(same) == []
    (output,) = scheduler.add_request(second)
    assert output.request is first
    assert output.finish_reason is FinishReason.SUPERSEDED
    assert scheduler.add_request(make_request()) == []
    (output,) = step(scheduler)
    assert output.request is second
    assert output.position == 2
    check_invariants(scheduler, [first, same, second][::2])


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make_request(output_token_ids=[5, EOS]), FinishReason.STOP),
        (make_request(output_token_ids=[5, 6, 7, 8], max_tokens=4), FinishReason.LENGTH),
    ],
)
def test_a_resumed_request_that_lacks_nothing_ends_at_once(request_: Request, reason: FinishReason) -> None:
    (output,) = make_scheduler().add_request(request_)
    assert output.finish_reason is reason
    assert output.position == len(request_.output_token_ids)


def test_a_runner_that_answers_in_another_shape_is_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request())
    with pytest.raises(ValueError, match="sampled no token"):
        scheduler.update_from_output(scheduler.schedule(), RunnerOutput([None]))


def test_config_names_every_bad_field() -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at least 1.*must be at least max_num_seqs"):
        make_config(max_model_len=0, max_num_batched_tokens=4, max_num_seqs=5)
