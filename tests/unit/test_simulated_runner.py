import time

import pytest

from tests.engine_factories import EOS, make_engine, make_request, request_id
from workers.batch import SchedulerOutput
from workers.simulated_runner import SimulatedRunner


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


@pytest.mark.parametrize(
    ("vocab_size", "eos", "step_ms", "message"),
    [(10, set(), -1, "step_ms must not be negative"), (2, {EOS, 0}, 0, "no token id is left")],
)
def test_refuses_what_cannot_work(vocab_size: int, eos: set[int], step_ms: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedRunner(vocab_size=vocab_size, eos_token_ids=eos, step_ms=step_ms)
