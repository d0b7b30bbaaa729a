"""The benchmark of the engine alone, on a simulated model."""

import random

import pytest

from infra.benchmarks.engine_speed import EngineSpeedTest
from tests.engine_factories import make_engine
from workers.engine import Engine


def make(engine: Engine) -> EngineSpeedTest:
    return EngineSpeedTest(engine, vocab_size=2000, rng=random.Random(0))


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_decode_measures_full_batches_around_the_context_and_leaves_nothing(num_seqs: int) -> None:
    engine = make_engine(max_num_seqs=32, max_num_batched_tokens=512)
    speed = make(engine).decode(num_seqs, context=256, steps=32)
    assert speed.context == pytest.approx(256, abs=4)
    assert speed.tok_s > 0
    assert not engine.scheduler.has_requests
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def test_a_batch_that_does_not_fit_is_no_figure() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=512)
    with pytest.raises(RuntimeError, match="32 steps of 8 sequences gave"):
        make(engine).decode(8, context=256, steps=32)


def test_prefill_counts_the_tokens_of_a_prompt_by_the_time_of_its_steps() -> None:
    engine = make_engine(step_ms=5, max_num_batched_tokens=128, max_prefill_chunk=128)
    speed = make(engine).prefill(512)
    # Four steps of 5 ms; the first one may have begun with the end of a step before.
    assert 0 < speed.tok_s <= 512 / 0.0174
    assert not engine.scheduler.has_requests


def test_a_prompt_that_the_engine_refuses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the engine refused a request"):
        make(make_engine(max_model_len=100)).prefill(512)
