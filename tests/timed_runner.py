"""A simulated runner on a clock of its own, with a step time that the test gives."""

from collections.abc import Callable

from workers.batch import RunnerOutput, SchedulerOutput
from workers.simulated_runner import SimulatedRunner

StepSeconds = Callable[[int, int, int], float]


class TimedRunner(SimulatedRunner):
    """Each step moves `now` on by step_s(sequences, tokens, context tokens)."""

    def __init__(self, step_s: StepSeconds) -> None:
        super().__init__(vocab_size=1000, first_token_id=2, eos_token_ids={1})
        self.now = 0.0
        self.last_s = 0.0
        self._seconds = step_s

    def clock(self) -> float:
        return self.now

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        num_tokens = batch.total_num_scheduled_tokens
        self.last_s = self._seconds(len(batch.scheduled), num_tokens, batch.num_context_tokens)
        self.now += self.last_s
        return super().execute(batch)
