"""An engine on a CUDA device: its memory, its graphs, its ranks over NCCL. Without one: what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.config import from_env
from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.decoder_files import make_prompt
from tests.small_model import make_model
from workers.config import WorkerConfig
from workers.followers import backend_of
from workers.model_runner import TorchModelRunner
from workers.request import Request
from workers.runners import LoadedEngine, load_engine

NO_GPU = not torch.cuda.is_available()
PROMPT = make_prompt(50)
DEPLOYMENT = {"tensor_parallel": 1, "device_memory_gb": 80, "weight_format": "bf16", "kv_format": "bf16"}


def load(models_dir: Path, **settings: str) -> LoadedEngine:
    return load_engine(
        from_env(
            WorkerConfig,
            {
                "HEADRACE_MODELS_DIR": str(models_dir),
                "HEADRACE_MODEL": "qwen3",
                "HEADRACE_CANARY_S": "0",
                "HEADRACE_KAFKA": "127.0.0.1:1",  # not asked
                "HEADRACE_MAX_NUM_SEQS": "5",
                "HEADRACE_THREADS": "1",
                "HEADRACE_SWAP_MEMORY_MIB": "1",
                **settings,
            },
        )
    )


def run(loaded: LoadedEngine, num_requests: int, **sampling: Any) -> list[list[int]]:
    requests = [
        Request(
            request_id=bytes([number + 1]) * 16,
            attempt=1,
            priority=PriorityClass.INTERACTIVE,
            prompt_token_ids=PROMPT[number:],
            sampling=SamplingParams(max_tokens=12, ignore_eos=True, **sampling),
            reply_partition=0,
            expected_output_tokens=1,
        )
        for number in range(num_requests)
    ]
    for request in requests:
        loaded.engine.add_request(request)
    while loaded.engine.scheduler.has_requests:
        loaded.engine.step()
    return [request.output_token_ids for request in requests]


def test_ranks_talk_by_what_their_device_has() -> None:
    assert backend_of(torch.device("cuda", 1)) == "nccl"
    assert backend_of(torch.device("cpu")) == "gloo"


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="HEADRACE_DEVICE is cuda, but torch finds no CUDA device"):
        load(tmp_path, HEADRACE_DEVICE="cuda")


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_an_fp8_cache_is_refused_on_the_cpu(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="HEADRACE_KV_DTYPE is fp8: that is for GPUs"):
        load(tmp_path, HEADRACE_KV_DTYPE="fp8")


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_a_model_is_spread_over_as_many_ranks_as_its_entry_says(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", deployment=DEPLOYMENT | {"tensor_parallel": 2})
    loaded = load(tmp_path, HEADRACE_DETERMINISTIC="true", HEADRACE_THREADS="1")
    runner = loaded.engine.runner
    assert isinstance(runner, TorchModelRunner)
    assert len(runner.rank_pids) == 1
    of_two = run(loaded, 2)
    runner.close()
    alone = load(tmp_path, HEADRACE_DETERMINISTIC="true", HEADRACE_TENSOR_PARALLEL="1")
    assert run(alone, 2) == of_two


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_an_entry_that_cannot_be_followed_is_told_with_what_overrides_it(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", deployment=DEPLOYMENT | {"tensor_parallel": 3})
    message = (
        "HEADRACE_TENSOR_PARALLEL is 3: the model's 4 heads are no multiple of it; so says the catalogue "
        "entry of 'qwen3', and HEADRACE_TENSOR_PARALLEL overrides it"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "logprobs": 2}])
@pytest.mark.cuda
@pytest.mark.skipif(NO_GPU, reason="needs an NVIDIA GPU")
def test_an_engine_on_a_gpu_serves_what_the_cpu_serves(
    tmp_path: Path, sampling: dict[str, Any], num_ranks: int, kv_dtype: str
) -> None:
    """Alone and as many as no graph has; near ties may turn, so most tokens must be equal."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip("needs two GPUs")
    make_model(tmp_path, "qwen3")
    on_gpu = load(tmp_path, HEADRACE_TENSOR_PARALLEL=str(num_ranks), HEADRACE_KV_DTYPE=kv_dtype)
    assert on_gpu.num_gpus == num_ranks
    on_cpu = load(tmp_path, HEADRACE_DEVICE="cpu", HEADRACE_DETERMINISTIC="true")
    for count in (1, 3, 5):
        pairs = zip(run(on_gpu, count, **sampling), run(on_cpu, count, **sampling), strict=True)
        first_equal = [mine[0] == theirs[0] for mine, theirs in pairs]
        assert sum(first_equal) >= count - 1


@pytest.mark.cuda
@pytest.mark.skipif(NO_GPU, reason="needs an NVIDIA GPU")
def test_a_pool_that_does_not_fit_a_gpu_is_told(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="lower HEADRACE_KV_MEMORY_MIB to at most"):
        load(tmp_path, HEADRACE_KV_MEMORY_MIB=str(10**7))
