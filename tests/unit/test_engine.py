import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from schemas.priority import PriorityClass
from tests.engine_factories import (
    EOS,
    make_config,
    make_engine,
    make_kv,
    make_request,
    make_runner,
    request_id,
)
from workers.batch import PreemptionMode, PreemptionReason, RunnerOutput, SchedulerOutput
from workers.engine import Engine, EngineThread, StepResult
from workers.request import FinishReason, RequestOutput
from workers.simulated_runner import SimulatedRunner

DEADLINE_S = 10


class Outputs:
    """Takes what an engine thread delivers."""

    def __init__(self) -> None:
        self.errors: queue.Queue[BaseException] = queue.Queue()
        self.ready = threading.Event()

    def take(self, thread: EngineThread) -> list[StepResult]:
        assert self.ready.wait(DEADLINE_S)
        self.ready.clear()
        return thread.take_results()

    def until_end(self, thread: EngineThread, number: int) -> list[RequestOutput]:
        seen = []
        while True:
            for result in self.take(thread):
                seen += [o for o in result.outputs if o.request.request_id == request_id(number)]
            if seen and seen[-1].finish_reason:
                return seen


@contextmanager
def running(engine: Engine) -> Iterator[tuple[EngineThread, Outputs]]:
    outputs = Outputs()
    thread = EngineThread(engine, outputs.ready.set, outputs.errors.put)
    thread.start()
    try:
        yield thread, outputs
    finally:
        assert thread.stop(DEADLINE_S)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_request_goes_through_the_thread() -> None:
    with running(make_engine()) as (thread, outputs):
        thread.add(make_request(1, max_tokens=5))
        seen = outputs.until_end(thread, 1)
        assert [o.position for o in seen] == [0, 1, 2, 3, 4]
        expected = [make_runner().token_at(request_id(1), p) for p in range(5)]
        assert [t for o in seen for t in o.token_ids] == expected
        wait_for(lambda: thread.stats.num_running == 0)
        assert thread.step_age(time.monotonic()) == 0.0


def test_an_abort_ends_a_running_request_and_frees_its_blocks() -> None:
    with running(make_engine(step_ms=1)) as (thread, outputs):
        thread.add(make_request(1, max_tokens=4000))
        outputs.take(thread)
        thread.abort(request_id(1), 1)
        assert outputs.until_end(thread, 1)[-1].finish_reason is FinishReason.CANCELLED
        wait_for(lambda: thread.stats.free_blocks == thread.stats.num_blocks)


def test_a_refusal_is_delivered() -> None:
    with running(make_engine(num_blocks=1)) as (thread, outputs):
        thread.add(make_request(1, prompt_len=100))
        (output,) = outputs.until_end(thread, 1)
        assert output.finish_reason is FinishReason.ERROR
        assert "KV blocks" in output.error


def test_blocked_sequences_wait_and_go_on() -> None:
    with running(make_engine()) as (thread, outputs):
        thread.set_blocked(frozenset({3}))
        thread.add(make_request(1, reply_partition=3))
        thread.add(make_request(2, reply_partition=4))
        outputs.until_end(thread, 2)
        wait_for(lambda: thread.stats.num_running == 0)
        assert thread.stats.num_waiting == (1, 0, 0)
        thread.set_blocked(frozenset())
        assert len(outputs.until_end(thread, 1)) == 4


def test_read_offsets_show_only_with_what_was_read_before_them() -> None:
    with running(make_engine(step_ms=1)) as (thread, outputs):
        thread.add(make_request(1, priority=PriorityClass.FREE, max_tokens=4000))
        thread.note_read(PriorityClass.FREE, 17)
        wait_for(lambda: thread.stats.read_offsets == (0, 17, 0))
        assert thread.stats.num_running == 1
        thread.abort(request_id(1), 1)
        outputs.until_end(thread, 1)


def test_nobody_takes_the_results_so_the_engine_waits_and_then_goes_on() -> None:
    with running(make_engine()) as (thread, outputs):
        thread.add(make_request(1, max_tokens=1000))
        assert outputs.ready.wait(DEADLINE_S)
        wait_for(lambda: thread.step_age(time.monotonic()) == 0.0)
        held = thread.take_results()
        assert 1 < len(held) < 100
        rest = outputs.until_end(thread, 1)
        assert [o.position for r in held for o in r.outputs] + [o.position for o in rest] == list(range(1000))


class StuckRunner(SimulatedRunner):
    """Stays inside a step until it is told to fail."""

    def __init__(self) -> None:
        super().__init__(vocab_size=100)
        self.entered = threading.Event()
        self.fail = threading.Event()

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        self.entered.set()
        assert self.fail.wait(DEADLINE_S)
        raise RuntimeError("device lost")


def test_step_age_grows_in_a_stuck_step_and_a_runner_error_is_fatal() -> None:
    runner = StuckRunner()
    with running(Engine(make_config(), runner, make_kv(10), {EOS})) as (thread, outputs):
        thread.add(make_request(1))
        assert runner.entered.wait(DEADLINE_S)
        now = time.monotonic()
        assert thread.step_age(now + 5) > 4.9
        runner.fail.set()
        error = outputs.errors.get(timeout=DEADLINE_S)
        assert str(error) == "device lost"
        assert thread.take_results() == []


def test_warm_up_leaves_nothing_behind() -> None:
    engine = make_engine()
    engine.warm_up(token_id=5)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert not engine.scheduler.has_requests


def test_warm_up_says_why_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="the warm-up request was refused: the prompt has 32 tokens"):
        make_engine(max_model_len=20).warm_up(token_id=5)


class CopyCountingRunner(SimulatedRunner):
    """Notes what each step copies, and how many sequences it holds."""

    def __init__(self) -> None:
        super().__init__(vocab_size=1000, first_token_id=2, step_ms=1.0)
        self.steps: list[tuple[int, int, int]] = []

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        self.steps.append((len(batch.scheduled), len(batch.swap_out), len(batch.swap_in)))
        return super().execute(batch)


def test_stats_say_what_was_cached_swapped_and_preempted() -> None:
    runner = CopyCountingRunner()
    kv = make_kv(200, num_host_blocks=10, sharing="tenant")
    engine = Engine(make_config(max_num_seqs=1), runner, kv, {EOS})
    with running(engine) as (thread, outputs):
        thread.add(make_request(1, prompt_len=40, max_tokens=2000, priority=PriorityClass.BATCH))
        outputs.take(thread)
        thread.add(make_request(2, prompt_len=40, max_tokens=3))
        outputs.until_end(thread, 2)
        wait_for(lambda: thread.stats.num_running == 1 and thread.stats.free_host_blocks == 10)
        wait_for(lambda: thread.stats.predicted_step_ms > 0)
        # Each 16th token fills a block: nothing is left unused for a moment.
        wait_for(lambda: 0 < thread.stats.kv_fragmentation < 1)
        stats = thread.stats
        assert stats.preemptions == {(PreemptionReason.HIGHER_CLASS_SEQS, PreemptionMode.SWAP): 1}
        assert stats.num_preemptions == 1
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (80, 0)
        assert stats.num_host_blocks == 10
        thread.abort(request_id(1), 1)
        outputs.until_end(thread, 1)
    assert sum(out for _, out, _ in runner.steps) >= 3
    # Full blocks were still in the cache: of the others there is one at most.
    assert sum(back for _, _, back in runner.steps) <= 1
