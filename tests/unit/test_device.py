"""What a worker computes on, and how much of a GPU's memory goes to KV blocks."""

import dataclasses
import re

import pytest

from schemas.catalog import Deployment, simulated_model
from schemas.config import ConfigError, from_env
from workers.config import WorkerConfig
from workers.device import choose_device, choose_fp8_kv
from workers.device_pools import DeviceProfile, plan_device_pools
from workers.pool_sizes import MIB, PoolSizes

ENVIRONMENT = {"HEADRACE_KAFKA": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("setting", "has_gpu", "deterministic", "device"),
    [
        ("auto", True, False, "cuda"),
        ("auto", True, True, None),
        ("auto", False, False, None),
        ("cpu", True, False, None),
        ("cuda", True, False, "cuda"),
    ],
)
def test_a_gpu_is_used_where_there_is_one(
    setting: str, has_gpu: bool, deterministic: bool, device: str | None
) -> None:
    assert choose_device(setting, has_gpu, deterministic=deterministic) == device


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match="HEADRACE_DEVICE is cuda, but torch finds no CUDA device"):
        choose_device("cuda", False, deterministic=False)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"DEVICE": "tpu"}, "HEADRACE_DEVICE must be auto or cuda or cpu, got 'tpu'"),
        ({"KV_DTYPE": "int4"}, "HEADRACE_KV_DTYPE must be auto or bf16 or fp8, got 'int4'"),
        ({"DEVICE": "cuda", "DETERMINISTIC": "true"}, "HEADRACE_DETERMINISTIC is for CPUs"),
        ({"DEVICE": "cuda", "LINEAR": "int8"}, "HEADRACE_LINEAR is 'int8', which is for CPUs"),
        ({"DEVICE": "cpu", "KV_DTYPE": "fp8"}, "HEADRACE_KV_DTYPE is fp8: that is for GPUs"),
        ({"DEVICE": "cpu", "KV_DTYPE": "bf16"}, "HEADRACE_KV_DTYPE is bf16: that is for GPUs"),
        ({"DEVICE": "cuda", "RUNNER": "simulated"}, "the simulated runner computes on no device"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings: dict[str, str], error: str) -> None:
    named = {f"HEADRACE_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=re.escape(error)):
        from_env(WorkerConfig, ENVIRONMENT | named)


@pytest.mark.parametrize(
    ("setting", "entry", "has_fp8", "fp8"),
    [
        ("auto", "fp8", True, True),
        ("auto", "fp8", False, False),
        ("auto", "bf16", True, False),
        ("auto", None, True, False),
        ("bf16", "fp8", True, False),
        ("fp8", None, True, True),
        ("fp8", None, False, True),  # which is refused with the GPU's name
    ],
)
def test_keys_and_values_are_stored_as_the_entry_says(
    setting: str, entry: str | None, has_fp8: bool, fp8: bool
) -> None:
    deployment = None if entry is None else Deployment(8, 80, "fp8", entry)
    spec = dataclasses.replace(simulated_model(), deployment=deployment)
    assert choose_fp8_kv(setting, spec, has_fp8=has_fp8) == fp8


def test_a_gpu_runs_more_sequences_at_once() -> None:
    config = from_env(WorkerConfig, ENVIRONMENT)
    assert config.scheduler_config(4096).max_num_seqs == 64
    assert config.scheduler_config(4096, on_gpu=True).max_num_seqs == 256
    asked = from_env(WorkerConfig, ENVIRONMENT | {"HEADRACE_MAX_NUM_SEQS": "9"})
    assert asked.scheduler_config(4096, on_gpu=True).max_num_seqs == 9


PROFILE = DeviceProfile(free_bytes=60_000 * MIB, total_bytes=80_000 * MIB, peak_bytes=2_000 * MIB)


def plan(
    profile: DeviceProfile = PROFILE,
    *,
    kv_memory_mib: int | None = None,
    swap_memory_mib: int = 0,
    num_ranks: int = 1,
) -> PoolSizes:
    return plan_device_pools(
        profile,
        host_bytes=1_000 * MIB,
        kv_memory_mib=kv_memory_mib,
        swap_memory_mib=swap_memory_mib,
        rank_bytes_per_block=2 * MIB,
        num_ranks=num_ranks,
    )


def test_kv_blocks_take_what_is_left() -> None:
    # A tenth of the GPU is kept free.
    assert plan() == PoolSizes(25_000, 0)
    assert plan(num_ranks=4, swap_memory_mib=800) == PoolSizes(25_000, 100)


def test_what_is_asked_for_is_of_all_ranks() -> None:
    assert plan(kv_memory_mib=100) == PoolSizes(50, 0)
    assert plan(kv_memory_mib=800, num_ranks=4) == PoolSizes(100, 0)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"kv_memory_mib": 60_000}, "lower HEADRACE_KV_MEMORY_MIB to at most 50000"),
        ({"kv_memory_mib": 300_000, "num_ranks": 4}, "lower HEADRACE_KV_MEMORY_MIB to at most 200000"),
        ({"kv_memory_mib": 1}, "raise it, a block takes 2097152 bytes"),
        ({"swap_memory_mib": 2_000}, "HEADRACE_SWAP_MEMORY_MIB is 2000: lower it, the host has 1000 MiB"),
        (
            {"profile": DeviceProfile(9_000 * MIB, 80_000 * MIB, 2_000 * MIB)},
            "raise HEADRACE_TENSOR_PARALLEL",
        ),
    ],
)
def test_what_does_not_fit_says_what_to_change(settings: dict[str, object], advice: str) -> None:
    with pytest.raises(ValueError, match=re.escape(advice)):
        plan(**settings)  # type: ignore[arg-type]
