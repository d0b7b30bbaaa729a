"""How many sequences a worker runs where nobody says."""

import pytest

from schemas.config import ConfigError
from workers.config import load_config
from workers.scheduler_config import gpu_max_num_seqs

H100 = {
    "SIMULATED_GPU": "h100",
    "RUNNER": "simulated",
    "SIMULATED_MODEL": "8b",
    "SIMULATED_TENSOR_PARALLEL": "1",
}


def max_num_seqs(**settings: str) -> int:
    environ = {f"HEADRACE_{name}": value for name, value in settings.items()}
    return load_config({"HEADRACE_KAFKA": "none"} | environ).scheduler_config(4_096).max_num_seqs


@pytest.mark.parametrize(
    ("num_blocks", "max_num_batched_tokens", "expected"),
    [
        (30_503, 512, 256),  # what an H100 has beside 8b: 476 times 1,024 tokens
        (30_503, 2_048, 256),
        (30_503, 300, 150),  # half of a step is for prompts
        (10_000, 512, 156),  # as the KV holds
        (100, 512, 64),
        (30_503, 64, 64),
    ],
)
def test_gpus_run_what_their_kv_holds_within_a_bound(
    num_blocks: int, max_num_batched_tokens: int, expected: int
) -> None:
    assert gpu_max_num_seqs(num_blocks, max_num_batched_tokens) == expected


def test_a_worker_takes_them_from_its_gpus_its_kv_budget_or_its_settings() -> None:
    assert max_num_seqs(RUNNER="simulated") == max_num_seqs() == 64
    assert max_num_seqs(**H100) == 256
    assert max_num_seqs(**H100, KV_MEMORY_MIB="16384") == 128  # 128 KiB a token
    assert max_num_seqs(**H100, MAX_NUM_SEQS="500") == 500


def test_a_gpu_that_is_none_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        max_num_seqs(**{**H100, "SIMULATED_TENSOR_PARALLEL": "3"})
    assert str(caught.value).count("tensor_parallel must divide") == 1
