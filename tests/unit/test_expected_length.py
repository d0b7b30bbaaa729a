"""Into the running batch by expected length: more at a time, few preempted, and no harm when lengths jump."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import EOS, check_invariants, make_request, make_scheduler
from workers.batch import RunnerOutput
from workers.expected_length import ExpectedLengths
from workers.request import FinishReason, Request
from workers.scheduler import Scheduler

INTERACTIVE, FREE, BATCH = PriorityClass
NUM_BLOCKS = 2000


@dataclass
class Outcome:
    ended: list[Request]
    most_running: int
    preempted_at: list[tuple[int, Request]]
    num_steps: int


class Ends:
    """Sequences that end by an end token after a length that the engine does not know."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._lengths: dict[Request, int] = {}
        self._number = 0

    def add(self, real: int, **fields: object) -> Request:
        self._number += 1
        request = make_request(self._number, prompt_len=100, **fields)  # type: ignore[arg-type]
        self._lengths[request] = real
        assert self.scheduler.add_request(request) == []
        return request

    def run(self, keep_waiting: Callable[[int], bool], max_steps: int = 20_000) -> Outcome:
        """`keep_waiting(step)` adds what comes at that step and says whether more may come."""
        outcome = Outcome([], 0, [], 0)
        more = True
        while more or self.scheduler.has_requests:
            more = more and keep_waiting(outcome.num_steps)
            batch = self.scheduler.schedule()
            outcome.preempted_at += [(outcome.num_steps, p.victim) for p in batch.preempted]
            sampled = [self._token(s.request) if s.samples else None for s in batch.scheduled]
            for output in self.scheduler.update_from_output(batch, RunnerOutput(sampled)):
                if output.finish_reason:
                    assert output.finish_reason is FinishReason.STOP
                    outcome.ended.append(output.request)
            outcome.most_running = max(outcome.most_running, self.scheduler.num_running)
            outcome.num_steps += 1
            assert outcome.num_steps < max_steps
        return outcome

    def _token(self, request: Request) -> int:
        return EOS if len(request.output_token_ids) + 1 >= self._lengths[request] else 7


def engine() -> Ends:
    return Ends(
        make_scheduler(
            num_blocks=NUM_BLOCKS,
            max_model_len=8192,
            max_num_seqs=2000,
            max_num_batched_tokens=8192,
            max_num_waiting=10_000,
        )
    )


# What full reservation of 100 + 4,096 tokens would run at a time.
FULL_RESERVATION = NUM_BLOCKS // (4196 // 16)


@pytest.mark.parametrize(
    "expected",
    [pytest.param(50, id="the dispatch says it"), pytest.param(None, id="learned from those that ended")],
)
def test_real_outputs_of_50_with_max_tokens_4096(expected: int | None) -> None:
    ends = engine()
    rng = random.Random(1)

    def keep_waiting(step: int) -> bool:
        while ends.scheduler.num_waiting < 20:
            # Geometric: half of them are longer than 35, one in 150 is longer than 250.
            real = 1 + int(rng.expovariate(1 / 50))
            ends.add(real, max_tokens=4096, expected_output_tokens=expected, tenant="a")
        return step < 400

    outcome = ends.run(keep_waiting)
    assert outcome.most_running >= 3 * FULL_RESERVATION
    assert len(outcome.ended) > 700
    assert len(outcome.preempted_at) < 0.01 * len(outcome.ended)


def test_a_tenant_whose_lengths_jump_tenfold_recovers_without_harm() -> None:
    ends = engine()
    rng = random.Random(2)
    jump_at = 200
    long_ones: list[Request] = []
    others: list[Request] = []

    def keep_waiting(step: int) -> bool:
        while ends.scheduler.num_waiting_by_class()[FREE] < 20:
            real = rng.randint(40, 60) * (10 if step >= jump_at else 1)
            request = ends.add(
                real, max_tokens=4096, expected_output_tokens=50, tenant="jumps", priority=FREE
            )
            if step >= jump_at:
                long_ones.append(request)
        if step % 4 == 0:
            others.append(
                ends.add(rng.randint(40, 60), max_tokens=200, expected_output_tokens=50, tenant="b")
            )
        return step < 2000

    outcome = ends.run(keep_waiting)
    assert len(outcome.ended) == len(set(outcome.ended))
    assert set(long_ones) | set(others) <= set(outcome.ended)
    # The other tenant, whose class is higher, never notices.
    assert not any(r.num_preemptions for r in others)
    # The tenant itself is disturbed by those that were admitted before it was known, and no longer.
    at_first = [step for step, _ in outcome.preempted_at if step < jump_at + 600]
    later = [step for step, _ in outcome.preempted_at if step >= jump_at + 600]
    assert len(later) < 0.01 * len(long_ones)
    assert len(at_first) <= outcome.most_running
    assert max(r.num_preemptions for r in long_ones) <= 3


def test_a_class_is_promised_its_blocks_against_lower_ones_not_against_higher_ones() -> None:
    scheduler = make_scheduler(num_blocks=40, max_model_len=640)
    batch = make_request(1, prompt_len=16, max_tokens=500, priority=BATCH)
    second = make_request(2, prompt_len=16, max_tokens=500, priority=BATCH)
    interactive = make_request(3, prompt_len=16, max_tokens=500)
    for request in (batch, second, interactive):
        scheduler.add_request(request)
        step = scheduler.schedule()
        scheduler.update_from_output(step, RunnerOutput([7] * len(step.scheduled)))
        check_invariants(scheduler, [batch, second, interactive][: request.arrival])
    assert list(scheduler.running) == [interactive, batch]
    assert scheduler.num_preemptions == 0


def test_what_passes_its_expectation_is_expected_to_double_up_to_its_limit() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt_len=16, max_tokens=200, expected_output_tokens=17)
    scheduler.add_request(request)
    seen: list[int] = []
    while scheduler.has_requests:
        step = scheduler.schedule()
        if not seen or seen[-1] != request.num_expected_blocks:
            seen.append(request.num_expected_blocks)
        scheduler.update_from_output(step, RunnerOutput([7] * len(step.scheduled)))
        check_invariants(scheduler, [request])
    # 16 + 17 - 1 tokens; then 2 * 17, 2 * 50 (of 51, the last in block 4), at most 16 + 200 - 1.
    assert seen == [2, 4, 8, 14]


def test_batch_is_admitted_above_the_watermark_only_and_other_classes_below_it_too() -> None:
    scheduler = make_scheduler(num_blocks=10, batch_watermark=0.5)
    first, second = (make_request(n, prompt_len=40, max_tokens=2, priority=BATCH) for n in (1, 2))
    for request in (first, second):
        scheduler.add_request(request)
    scheduler.schedule()
    assert list(scheduler.running) == [first]
    free = make_request(3, prompt_len=40, max_tokens=2, priority=FREE)
    scheduler.add_request(free)
    scheduler.schedule()
    assert list(scheduler.running) == [free, first]


def test_an_idle_engine_takes_a_batch_request_that_leaves_less_than_the_watermark() -> None:
    scheduler = make_scheduler(num_blocks=10, batch_watermark=0.5)
    request = make_request(1, prompt_len=130, max_tokens=2, priority=BATCH)
    scheduler.add_request(request)
    scheduler.schedule()
    assert list(scheduler.running) == [request]


def test_ratios_are_kept_for_a_bounded_number_of_tenants() -> None:
    lengths = ExpectedLengths()
    for number in range(5000):
        request = make_request(1, tenant=f"t{number}", max_tokens=100, output_token_ids=[7] * 10)
        lengths.on_end(request)
    assert lengths.ratio("t4999") < 1.0
    assert lengths.ratio("t0") == 1.0
