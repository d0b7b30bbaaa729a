"""While an interactive sequence runs, steps meet the inter-token target; else the batch may grow."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import make_config, make_kv, make_request
from tests.timed_runner import StepSeconds, TimedRunner
from workers.batch import SchedulerOutput
from workers.engine import Engine

INTERACTIVE, FREE, BATCH = PriorityClass
LEARNING_STEPS = 60


def gpu(num_seqs: int, num_tokens: int, num_context: int) -> float:
    """Weights are read in 6 ms, or computing takes longer; then the KV is read."""
    return max(0.006, 2e-5 * num_tokens) + 1e-7 * num_context


def cpu(num_seqs: int, num_tokens: int, num_context: int) -> float:
    return 0.012 + 0.002 * num_seqs + 0.0005 * (num_tokens - num_seqs) + 1e-6 * num_context


@dataclass(frozen=True)
class Step:
    seconds: float
    batch: SchedulerOutput
    streams: int
    """Interactive decodes in it."""
    lower: int
    """Sequences of lower classes in it."""


class Load:
    """A flood of batch work beside `num_streams` interactive requests, one coming as another one ends."""

    def __init__(self, step_s: StepSeconds, target_ms: float, **limits: object) -> None:
        self.runner = TimedRunner(step_s)
        config = make_config(
            max_model_len=8192,
            max_num_seqs=256,
            max_num_batched_tokens=512,
            max_num_waiting=10_000,
            inter_token_target_ms=target_ms,
            **limits,
        )
        self.engine = Engine(config, self.runner, make_kv(60_000), {1}, clock=self.runner.clock)
        self.num_streams = 0
        self._number = 0

    def steps(self, num_steps: int) -> Iterator[Step]:
        scheduler = self.engine.scheduler
        for _ in range(num_steps):
            while scheduler.num_waiting_by_class()[BATCH] < 5:
                self._add(BATCH, 300, 200)
            running = sum(r.priority is INTERACTIVE for r in scheduler.running)
            if running + scheduler.num_waiting_by_class()[INTERACTIVE] < self.num_streams:
                self._add(INTERACTIVE, 200, 100)
            batch, _ = self.engine.step()
            classes = [(s.request.priority, s.num_scheduled_tokens) for s in batch.scheduled]
            yield Step(
                self.runner.last_s,
                batch,
                sum(c is INTERACTIVE and n == 1 for c, n in classes),
                sum(c is not INTERACTIVE for c, _ in classes),
            )

    def _add(self, priority: PriorityClass, prompt_len: int, max_tokens: int) -> None:
        self._number += 1
        self.engine.add_request(
            make_request(self._number, prompt_len=prompt_len, max_tokens=max_tokens, priority=priority)
        )


@pytest.mark.parametrize("hold_batch_in_prefill", [False, True])
@pytest.mark.parametrize(("step_s", "target_ms"), [(cpu, 45.0), (gpu, 12.0), (gpu, 9.0)])
def test_steps_with_a_stream_meet_the_target_once_the_machine_is_known(
    step_s: StepSeconds, target_ms: float, hold_batch_in_prefill: bool
) -> None:
    load = Load(step_s, target_ms, hold_batch_in_prefill=hold_batch_in_prefill)
    load.num_streams = 4
    list(load.steps(LEARNING_STEPS))
    seen = [step for step in load.steps(500) if step.streams]
    assert len(seen) > 400
    times = sorted(1000 * step.seconds for step in seen)
    assert times[len(times) // 2] <= 1.02 * target_ms
    # A bent machine surprises where a long prompt follows many decodes, for a step or two.
    assert times[int(0.95 * len(times))] <= 1.12 * target_ms
    assert times[-1] <= 1.25 * target_ms
    # Not met by shutting the batch out: there is room for it, and it is used.
    assert sum(step.lower for step in seen) / len(seen) >= 3
    assert max(step.lower for step in seen) < 250


def test_without_a_stream_the_batch_is_as_large_as_it_can_be() -> None:
    load = Load(cpu, 45.0)
    load.num_streams = 1
    list(load.steps(LEARNING_STEPS))
    assert max(step.lower for step in load.steps(50)) < 30
    load.num_streams = 0
    assert max(step.lower for step in load.steps(400)) > 240


def test_decodes_that_are_held_back_keep_their_blocks_and_go_on_when_the_stream_ends() -> None:
    load = Load(cpu, 45.0)
    list(load.steps(200))
    running = [r for r in load.engine.scheduler.running if r.priority is BATCH]
    held_before = {r: list(r.block_table) for r in running}
    load.num_streams = 1
    steps = list(load.steps(10))
    assert 0 < steps[-1].lower < len(running) / 2
    assert not any(step.batch.preempted for step in steps)
    # The newest are the first to be held back.
    going = {s.request.arrival for s in steps[-1].batch.scheduled if s.request.priority is BATCH}
    held = [
        r.arrival for r in load.engine.scheduler.running if r.priority is BATCH and r.arrival not in going
    ]
    assert max(going) < min(held)
    for request in running:
        if request.arrival in held:
            assert request.block_table == held_before[request]
    load.num_streams = 0
    last = list(load.steps(250))[-1]
    assert last.lower > len(running) / 2


def test_where_the_target_is_out_of_reach_streams_and_their_prompts_go_on() -> None:
    load = Load(cpu, 5.0)
    load.num_streams = 2
    steps = list(load.steps(200))[LEARNING_STEPS:]
    assert all(step.lower == 0 for step in steps if step.streams)
    prompts = [
        s for step in steps if step.streams for s in step.batch.scheduled if s.num_scheduled_tokens > 1
    ]
    assert prompts
    assert all(s.num_scheduled_tokens >= 32 or s.samples for s in prompts)
    assert sum(step.streams for step in steps) > 150


def test_an_interactive_prompt_is_not_cut_where_no_stream_waits() -> None:
    load = Load(cpu, 45.0)
    list(load.steps(LEARNING_STEPS))
    load.engine.add_request(make_request(9999, prompt_len=500, max_tokens=2))
    batch, _ = load.engine.step()
    (prompt,) = [s for s in batch.scheduled if s.request.priority is INTERACTIVE]
    assert prompt.num_scheduled_tokens > 200


@pytest.mark.parametrize("hold", [False, True])
def test_batch_decodes_stand_still_in_a_step_with_an_interactive_prompt_if_that_is_asked_for(
    hold: bool,
) -> None:
    load = Load(cpu, 0.0, hold_batch_in_prefill=hold)
    list(load.steps(50))
    free = make_request(9998, prompt_len=20, max_tokens=500, priority=FREE)
    load.engine.add_request(free)
    list(load.steps(3))
    load.engine.add_request(make_request(9999, prompt_len=100, max_tokens=5))
    prefill, decode = list(load.steps(2))
    in_prefill = {s.request.priority for s in prefill.batch.scheduled if s.num_scheduled_tokens == 1}
    assert in_prefill == ({FREE} if hold else {FREE, BATCH})
    assert decode.lower > 1
