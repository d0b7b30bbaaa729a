import re
import time
from typing import Any

import pytest

from schemas.config import ConfigError
from schemas.sampling import Grammar, TokenLogprobs
from schemas.tokenization import Tokenizer
from tests.engine_factories import EOS, make_config, make_engine, make_request, request_id
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.config import load_config
from workers.engine import Engine
from workers.kv_cache_manager import make_kv_cache_manager
from workers.request import FinishReason
from workers.roofline import DEVICES, MODELS, Roofline, StepLoad
from workers.runners import load_engine
from workers.simulated_runner import SimulatedRunner
from workers.step_time import num_attended_pairs
from workers.text_rules import TextRules

H100S = Roofline(DEVICES["h100"], MODELS["70b"], tensor_parallel=8)


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def make(fake: FakeTime, step_ms: float) -> SimulatedRunner:
    return SimulatedRunner(vocab_size=50, step_ms=step_ms, clock=lambda: fake.now, sleep=fake.sleep)


def test_tokens_are_a_function_of_request_and_position_and_never_end() -> None:
    runner = SimulatedRunner(vocab_size=8, first_token_id=2, eos_token_ids={3, 5})
    tokens = [runner.token_at(request_id(r), p) for r in range(40) for p in range(40)]
    assert set(tokens) == {2, 4, 6, 7}
    assert tokens == [runner.token_at(request_id(r), p) for r in range(40) for p in range(40)]
    assert tokens[:40] != tokens[40:80]


def test_steps_in_a_row_keep_the_cadence_whatever_the_engine_takes_between_them() -> None:
    fake = FakeTime()
    runner = make(fake, 10)
    ends = []
    for pause in (0.001, 0.004, 0.0, 0.002):
        runner.execute(SchedulerOutput())
        ends.append(fake.now)
        fake.now += pause
    assert ends == pytest.approx([100.01, 100.02, 100.03, 100.04])


def test_a_step_after_a_pause_takes_its_full_time() -> None:
    fake = FakeTime()
    runner = make(fake, 10)
    runner.execute(SchedulerOutput())
    fake.now += 0.006
    began = fake.now
    runner.execute(SchedulerOutput())
    assert fake.now - began == pytest.approx(0.01)


def test_the_real_clock_is_not_outrun() -> None:
    engine = make_engine(step_ms=2)
    engine.add_request(make_request(max_tokens=50, prompt_len=1))
    began = time.monotonic()
    while engine.scheduler.has_requests:
        engine.step()
    assert time.monotonic() - began >= 0.0999


def on_gpus(fake: FakeTime, speed: float = 1.0) -> SimulatedRunner:
    return SimulatedRunner(
        vocab_size=50, roofline=H100S, speed=speed, clock=lambda: fake.now, sleep=fake.sleep
    )


def batch_of(*chunks: tuple[int, int]) -> SchedulerOutput:
    """Of (computed tokens, scheduled tokens) for each sequence; all sample."""
    batch = SchedulerOutput()
    for number, (computed, scheduled) in enumerate(chunks):
        request = make_request(number, prompt_len=computed + scheduled)
        request.num_computed_tokens = computed
        batch.scheduled.append(ScheduledSequence(request, scheduled, samples=True))
        batch.total_num_scheduled_tokens += scheduled
        batch.num_sampled += 1
        batch.num_context_tokens += computed + scheduled
        batch.num_attended_pairs += num_attended_pairs(computed, scheduled - 1)
    return batch


def test_a_step_on_simulated_gpus_takes_what_the_roofline_says_of_its_batch() -> None:
    fake = FakeTime()
    runner = on_gpus(fake)
    for chunks in ([(0, 2000)], [(2499, 1)] * 100, [(2499, 1)] * 100 + [(512, 512)]):
        fake.now += 1.0
        began = fake.now
        runner.execute(batch_of(*chunks))
        expected = H100S.step_seconds(StepLoad.of((*chunk, True) for chunk in chunks))
        assert fake.now - began == pytest.approx(expected)


def test_swapped_blocks_take_their_time_on_the_link_in_both_directions() -> None:
    runner = on_gpus(FakeTime())
    copies = SchedulerOutput(swap_out=[(0, 0), (1, 1)], swap_in=[(2, 2)])
    assert runner.step_seconds(copies) == pytest.approx(3 * 16 * 320 * 1024 / runner.swap_bytes_per_s)
    both = batch_of((100, 1))
    alone = runner.step_seconds(both)
    both.swap_in = copies.swap_in
    assert runner.step_seconds(both) == pytest.approx(alone + runner.step_seconds(copies) / 3)


def test_speed_shortens_steps_and_copies_alike_and_0_is_no_delay() -> None:
    batch = batch_of((100, 1))
    batch.swap_out = [(0, 0)]
    once, twice = on_gpus(FakeTime()), on_gpus(FakeTime(), speed=2)
    assert twice.step_seconds(batch) == pytest.approx(once.step_seconds(batch) / 2)
    assert twice.swap_bytes_per_s == 2 * once.swap_bytes_per_s
    fake = FakeTime()
    on_gpus(fake, speed=0).execute(batch)
    assert fake.now == FakeTime().now


def test_an_engine_on_simulated_gpus_decodes_as_the_textbook_says() -> None:
    fake = FakeTime()
    config = make_config(max_num_seqs=100, max_num_batched_tokens=4096)
    engine = Engine(
        config, on_gpus(fake), make_kv_cache_manager(H100S.num_blocks), {EOS}, clock=lambda: fake.now
    )
    for number in range(100):
        engine.add_request(make_request(number, prompt_len=2480, max_tokens=200, ignore_eos=True))
    while engine.step()[0].total_num_scheduled_tokens > 100:
        pass
    began = fake.now
    for _ in range(20):
        assert len(engine.step()[1]) == 100
    assert (fake.now - began) / 20 == pytest.approx(0.006, rel=0.05)


SETTINGS = {"HEADRACE_KAFKA": "", "HEADRACE_RUNNER": "simulated", "HEADRACE_SIMULATED_GPU": "h100"}


def test_the_pool_of_a_simulated_gpu_is_what_its_memory_has_left_unless_told() -> None:
    fast = {**SETTINGS, "HEADRACE_SIMULATED_SPEED": "0"}
    engine = load_engine(load_config(fast)).engine
    assert engine.pool.num_blocks == H100S.num_blocks
    assert engine.runner.bytes_per_block == H100S.bytes_per_block
    told = load_engine(load_config({**fast, "HEADRACE_KV_MEMORY_MIB": "1000"})).engine
    assert told.pool.num_blocks == (1000 << 20) // H100S.bytes_per_block


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"HEADRACE_SIMULATED_GPU": "a100"},
            "SIMULATED_GPU must be empty or h100 or h200 or b200, got 'a100'",
        ),
        ({"HEADRACE_SIMULATED_MODEL": "1t"}, "SIMULATED_MODEL must be 8b or 70b, got '1t'"),
        ({"HEADRACE_SIMULATED_KV_DTYPE": "int8"}, "SIMULATED_KV_DTYPE must be bf16 or fp8, got 'int8'"),
        ({"HEADRACE_SIMULATED_SPEED": "nan"}, "SIMULATED_SPEED must be 0 or more, got nan"),
        ({"HEADRACE_SIMULATED_TENSOR_PARALLEL": "3"}, "SIMULATED_GPU: tensor_parallel must divide the 8"),
        (
            {"HEADRACE_SIMULATED_TENSOR_PARALLEL": "1", "HEADRACE_SIMULATED_WEIGHT_DTYPE": "bf16"},
            "SIMULATED_GPU: 141 GB of weights leave no room for KV",
        ),
        ({"HEADRACE_STEP_MS": "5"}, "STEP_MS and HEADRACE_SIMULATED_GPU both say"),
        ({"HEADRACE_RUNNER": "torch"}, "SIMULATED_GPU needs HEADRACE_RUNNER=simulated"),
    ],
)
def test_settings_that_cannot_be_simulated_are_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("vocab_size", "eos", "step_ms", "message"),
    [(10, set(), -1, "step_ms must not be negative"), (2, {EOS, 0}, 0, "no token id is left")],
)
def test_refuses_what_cannot_work(vocab_size: int, eos: set[int], step_ms: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedRunner(vocab_size=vocab_size, eos_token_ids=eos, step_ms=step_ms)


def test_refuses_two_step_times_and_a_negative_speed() -> None:
    with pytest.raises(ValueError, match="give one"):
        SimulatedRunner(vocab_size=10, step_ms=1, roofline=H100S)
    with pytest.raises(ValueError, match="speed must be 0 or more, got -1"):
        SimulatedRunner(vocab_size=10, roofline=H100S, speed=-1)


def generate(attempt: int, output: list[int], rules: TextRules, **sampling: Any) -> list[int]:
    """All output tokens of one request through an engine, resumed behind `output`."""
    engine = Engine(
        make_config(),
        SimulatedRunner(vocab_size=127, first_token_id=32, mask_size=258),
        make_kv_cache_manager(100),
        {257},
    )
    request = make_request(7, max_tokens=60, attempt=attempt, output_token_ids=output, **sampling)
    assert rules.apply(request) is None
    engine.add_request(request)
    while engine.scheduler.has_requests:
        engine.step()
    assert request.finish_reason is FinishReason.STOP
    return request.output_token_ids


def test_under_a_grammar_tokens_are_allowed_ones_and_a_resume_goes_on_alike() -> None:
    rules = TextRules(Tokenizer.simulated(), 258, [257])
    sampling = {"grammar": Grammar("regex", "[a-c]{4,9}-(é|x)+y")}
    tokens = generate(1, [], rules, **sampling)
    assert re.fullmatch("[a-c]{4,9}-(é|x)+y", Tokenizer.simulated().detokenizer().push(tokens))
    assert tokens[-1] == 257
    for position in range(len(tokens)):
        assert generate(2, tokens[:position], rules, **sampling) == tokens


def test_each_token_is_certain_if_log_probabilities_are_asked_for() -> None:
    runner = SimulatedRunner(vocab_size=50)
    asked, silent = make_request(1, logprobs=3), make_request(2)
    output = runner.execute(
        SchedulerOutput([ScheduledSequence(asked, 8, True), ScheduledSequence(silent, 8, True)])
    )
    token = runner.token_at(request_id(1), 0)
    assert output.logprobs == [TokenLogprobs(0.0, [token], [0.0]), None]
    assert runner.execute(SchedulerOutput([ScheduledSequence(silent, 8, True)])).logprobs == []
