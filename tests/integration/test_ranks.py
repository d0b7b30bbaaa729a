"""The processes of a model runner over several ranks: how they end, and when none is started."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.decoder_files import CONFIGS, make_tensors, write_safetensors
from tests.integration.test_worker_lifecycle import is_running
from tests.service_process import ROOT
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.model_runner import TorchModelRunner
from workers.rank_died import RankDiedError
from workers.request import Request


def test_a_dead_rank_is_told_at_once_and_no_step_is_computed(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    path = write_safetensors(tmp_path, config, make_tensors(config))
    died: list[RankDiedError] = []
    told = threading.Event()

    def on_died(error: RankDiedError) -> None:
        died.append(error)
        told.set()

    request = Request(
        request_id=bytes(16),
        attempt=1,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=[5, 4, 3, 2, 1, 0, 6],
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        reply_partition=0,
        block_table=[0],
    )
    runner = TorchModelRunner(path, deterministic=True, num_threads=1, num_ranks=2, on_rank_died=on_died)
    try:
        runner.initialize_kv_cache(1)
        batch = SchedulerOutput([ScheduledSequence(request, 7, samples=True)])
        assert runner.execute(batch).token_ids[0] is not None
        assert not died
        os.kill(runner.rank_pids[0], signal.SIGKILL)
        assert told.wait(2)
        assert str(died[0]) == "rank 1 has ended with status -9"
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            runner.execute(batch)
        assert time.monotonic() - began < 2
    finally:
        runner.close()


def test_the_other_ranks_end_with_rank_0_however_it_ends(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    path = write_safetensors(tmp_path, config, make_tensors(config))
    program = (
        "import pathlib, time, workers.model_runner as m\n"
        f"runner = m.TorchModelRunner(pathlib.Path({str(path)!r}), num_threads=1, num_ranks=2)\n"
        "print(*runner.rank_pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert b"workers.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
        process.kill()
    deadline = time.monotonic() + 2
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            2,
            "the model's 3 heads are no multiple of it",
        ),
        (
            {"num_attention_heads": 1024, "intermediate_size": 1024, "head_dim": 2},
            1024,
            "at most one rank a core, and there are",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(
    tmp_path: Path, changes: dict[str, Any], num_ranks: int, message: str
) -> None:
    config = CONFIGS["qwen3"] | changes
    path = write_safetensors(tmp_path, config, make_tensors(config))
    with pytest.raises(ValueError, match=f"HEADRACE_TENSOR_PARALLEL is {num_ranks}: {message}"):
        TorchModelRunner(path, num_ranks=num_ranks)
