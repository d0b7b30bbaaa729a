"""The decoders of GPUs in bf16, over the plain operations: near fp32, and as large as the plan says.

With Triton's kernels they are in tests/triton.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.dispatch import PLAIN
from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.decoder_files import CONFIGS, make_prompt, make_tensors, write_safetensors
from workers.batch import ScheduledSequence
from workers.device_forward import DeviceForward
from workers.device_memory import device_plan
from workers.kv_memory import KVMemory, copy_between_devices
from workers.memory_plan import MemoryPlan
from workers.model_runner import TorchModelRunner
from workers.model_step import ModelStep, StepLimits, prepare_step
from workers.models.decoder_weights import DecoderWeights
from workers.models.device_decoder import DeviceDecoder
from workers.models.open_weights import open_weights
from workers.models.sharding import Sharding
from workers.request import Request

CPU = torch.device("cpu")
PROMPT = make_prompt(60)
LIMITS: dict[str, Any] = {"max_model_len": None, "max_num_batched_tokens": 512, "max_num_seqs": 8}


def write(folder: Path, family: str) -> Path:
    return write_safetensors(folder, CONFIGS[family], make_tensors(CONFIGS[family]))


def decoder(weights: DecoderWeights, dtype: torch.dtype = torch.bfloat16) -> DeviceDecoder:
    return DeviceDecoder(weights, CPU, dtype, PLAIN, Sharding(weights.config))


def sequences() -> list[ScheduledSequence]:
    requests = [
        Request(
            request_id=bytes([index]) * 16,
            attempt=1,
            priority=PriorityClass.INTERACTIVE,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=8),
            reply_partition=0,
            block_table=table,
        )
        for index, (prompt, table) in enumerate([(PROMPT, [6, 1, 5, 2]), (PROMPT[7:12], [4])])
    ]
    return [ScheduledSequence(each, len(each.prompt_token_ids), samples=True) for each in requests]


@pytest.mark.parametrize("family", [*CONFIGS])
def test_bf16_is_near_fp32(tmp_path: Path, family: str) -> None:
    path = write(tmp_path, family)
    runner = TorchModelRunner(path, deterministic=True, num_threads=1)
    runner.initialize_kv_cache(8)
    expected = runner.compute_logits(sequences())
    with open_weights(path) as weights, torch.inference_mode():
        model = decoder(weights)
        config = model.config
        memory = KVMemory(
            8,
            0,
            num_layers=config.num_layers,
            block_shape=(16, config.num_kv_heads, config.head_dim),
            dtype=torch.bfloat16,
        )
        step: ModelStep = prepare_step(sequences(), StepLimits(model.vocab_size, 8, model.max_model_len))
        logits: Tensor = DeviceForward(model).compute_logits(step, memory.device)
    error = ((logits - expected).square().mean() / expected.square().mean()).sqrt().item()
    print(family, error)
    assert 0 < error < 0.05


def plan(weights: DecoderWeights, usable_bytes: int, **changes: Any) -> MemoryPlan:
    settings = LIMITS | {"keep_fp8": True, "fp8_kv": False, "num_ranks": 1} | changes
    return device_plan(weights, usable_bytes, **settings)


@pytest.mark.parametrize("family", [*CONFIGS])
def test_a_model_takes_the_memory_that_the_plan_says(tmp_path: Path, family: str) -> None:
    with open_weights(write(tmp_path, family)) as weights, torch.inference_mode():
        model = decoder(weights)
        planned = plan(weights, 1 << 40).weight_bytes
    found: dict[int, int] = {}

    def count(value: object) -> None:
        match value:
            case Tensor():
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            case list():
                for each in value:
                    count(each)
            case dict():
                count([*value.values()])
            case _ if hasattr(value, "__slots__") and not hasattr(value, "__dict__"):
                count([getattr(value, name) for name in value.__slots__])
            case _ if type(value).__module__.startswith("workers.models.device"):
                count(vars(value))

    count(model)
    # Biases are planned in fp32.
    assert planned * 0.97 < sum(found.values()) <= planned


def test_a_model_that_does_not_fit_is_told_what_it_needs(tmp_path: Path) -> None:
    with open_weights(write(tmp_path, "llama")) as weights:
        fitting = plan(weights, 10_000_000)
        assert fitting.problem() is None
        needed = fitting.weight_bytes + fitting.step_bytes + fitting.min_blocks * fitting.bytes_per_block
        assert plan(weights, needed).problem() is None
        short = plan(weights, needed - 1)
        assert short.problem() is not None
        assert "it needs TP >= 2" in short.remedy()
        halved = plan(weights, 10_000_000, fp8_kv=True)
        assert halved.bytes_per_block * 2 == fitting.bytes_per_block


def test_blocks_are_copied_between_devices_as_they_are_within_one() -> None:
    generator = torch.Generator().manual_seed(1)
    device = torch.randint(256, (3, 6, 20), dtype=torch.uint8, generator=generator)
    host = torch.randint(256, (3, 4, 20), dtype=torch.uint8, generator=generator)
    before, kept = device.clone(), host.clone()
    copy_between_devices([device], [host], [(5, 0), (2, 3)])
    assert torch.equal(host[:, [0, 3]], before[:, [5, 2]])
    assert torch.equal(host[:, [1, 2]], kept[:, [1, 2]])
    copy_between_devices([host], [device], [(0, 1)])
    assert torch.equal(device[:, 1], before[:, 5])
    copy_between_devices([host], [device], [])
    assert torch.equal(device[:, 0], before[:, 0])


def test_an_fp8_pool_starts_empty() -> None:
    memory = KVMemory(2, 1, num_layers=1, block_shape=(16, 1, 8), dtype=torch.float8_e4m3fn)
    assert not memory.device.keys.float().any()
    assert memory.device.keys.untyped_storage().nbytes() == 2 * 16 * 8
