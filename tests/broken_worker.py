"""`python -m tests.broken_worker --child FD PID`: a worker proper whose engine breaks when it is told to.

A prompt that begins with WRONG makes all tokens wrong from then on, one that begins with STUCK keeps the step
that it is in from ending until the file in BROKEN_WORKER_RELEASE is there.
"""

import os
import sys
import time
from pathlib import Path
from unittest import mock

from schemas import logs
from workers import worker
from workers.__main__ import serve
from workers.batch import RunnerOutput, SchedulerOutput
from workers.config import WorkerConfig, load_config
from workers.runners import LoadedEngine, load_engine
from workers.simulated_runner import SimulatedRunner

WRONG, STUCK = 33, 34
RELEASE = "BROKEN_WORKER_RELEASE"
WRONG_FROM_THE_START = "BROKEN_WORKER_WRONG"


class BrokenRunner(SimulatedRunner):
    wrong = False

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        first = {s.request.prompt_token_ids[0] for s in batch.scheduled}
        while STUCK in first and not Path(os.environ[RELEASE]).exists():
            time.sleep(0.01)
        self.wrong = self.wrong or WRONG in first
        output = super().execute(batch)
        if self.wrong:
            output.token_ids = [None if t is None else (t + 1) % 127 for t in output.token_ids]
        return output


def load_broken_engine(config: WorkerConfig, on_rank_died: object) -> LoadedEngine:
    loaded = load_engine(config)
    runner = BrokenRunner(vocab_size=127, first_token_id=32, step_ms=config.step_ms)
    runner.wrong = WRONG_FROM_THE_START in os.environ
    loaded.engine.runner = runner
    return loaded


if __name__ == "__main__":
    config = load_config(os.environ)
    logs.configure("worker", config.slot, config.log_level)
    with mock.patch.object(worker, "load_engine", load_broken_engine):
        sys.exit(serve(config, epoch_fd=int(sys.argv[-2])))
