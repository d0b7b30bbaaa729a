"""A worker of two ranks on CPUs, as many as its model's entry says, serves; when one of them is killed, a
worker of one goes on, bit for bit."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.local.services import StackConfig
from tests.e2e.conftest import RunningStack, running_stack
from tests.e2e.test_streams import eventually
from tests.e2e.test_worker_change import Reading
from tests.small_model import make_model
from workers.exit_status import ExitStatus

BODY = {"prompt": "two ranks", "max_tokens": 200, "temperature": 0.8, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    deployment = {"device_memory_gb": 80, "weight_format": "bf16", "kv_format": "bf16"}
    make_model(folder / "models", "llama", deployment=deployment | {"tensor_parallel": 2})
    config = StackConfig(
        data_dir=folder / "data",
        models_dir=folder / "models",
        models=("llama",),
        deterministic=True,
        workers=2,
        settings={
            "worker": {
                "HEADRACE_THREADS": "1",
                "HEADRACE_KV_MEMORY_MIB": "4",
                "HEADRACE_SWAP_MEMORY_MIB": "0",
                "HEADRACE_MAX_NUM_SEQS": "4",
            },
            "worker-1": {"HEADRACE_TENSOR_PARALLEL": "1"},
        },
    )
    with running_stack(config) as running:
        yield running


def rank_pid(running: RunningStack) -> int:
    """The process of the worker's other rank."""
    found = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if os.getpgid(int(process.name)) == running.stack.child("worker-0").pid
        and b"workers.follower" in (process / "cmdline").read_bytes()
    ]
    (pid,) = found
    return pid


def test_a_killed_rank_ends_the_worker_and_another_goes_on(running: RunningStack) -> None:
    whole = Reading(running, "/v1/generate", **BODY)
    whole.read()
    assert whole.output_tokens == BODY["max_tokens"]

    streams = [Reading(running, "/v1/generate", **BODY) for _ in range(4)]
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        eventually(lambda: all(stream.begun.is_set() for stream in streams))
        assert running.metric("worker-0", "vllm:num_requests_running") > 0
        os.kill(rank_pid(running), signal.SIGKILL)
        eventually(lambda: not running.stack.child("worker-0").running)
        for each in reading:
            each.result(60)
    assert running.stack.child("worker-0").exit_status == ExitStatus.RANK_DIED
    for stream in streams:
        assert stream.output_tokens == BODY["max_tokens"]
        assert stream.text == whole.text
