"""The memory plan against published figures, and against what is really allocated for small models."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from infra.model_plan import PUBLISHED
from tests.decoder_files import CONFIGS, VOCAB_SIZE, make_tensors, write_gguf, write_safetensors
from workers.block_pool import BLOCK_SIZE
from workers.kv_memory import KVMemory
from workers.memory_check import check_fits
from workers.memory_plan import GB, Deployment, Format, MemoryPlan, tensor_parallel_degrees
from workers.memory_profile import worst_batches
from workers.model_runner import TorchModelRunner
from workers.models.decoder import Decoder
from workers.models.hugging_face_config import decoder_config
from workers.models.layers import can_pack
from workers.models.open_weights import open_weights
from workers.models.tensor_names import HuggingFaceNames
from workers.models.tensor_shapes import tensor_shapes
from workers.roofline import MODELS, DType, ModelShape
from workers.scheduler_config import SchedulerConfig

QWEN2_5_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}


def published(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((PUBLISHED / name / "config.json").read_text())
    return values


def plan(values: dict[str, Any], device_gb: float = 80, **deployment: Any) -> MemoryPlan:
    return MemoryPlan(
        decoder_config(values, "config.json"),
        values["vocab_size"],
        Deployment(device_bytes=int(device_gb * GB), **deployment),
    )


@pytest.mark.parametrize(
    ("values", "num_parameters", "kv_kib_per_token"),
    [
        (published("llama-3.1-8b"), 8_030_261_248, 128),
        (published("llama-3.1-70b"), 70_553_706_496, 320),
        (published("qwen3-8b"), 8_190_735_360, 144),
        (QWEN2_5_7B, 7_615_616_512, 56),
    ],
)
def test_parameters_and_kv_are_those_of_the_published_models(
    values: dict[str, Any], num_parameters: int, kv_kib_per_token: int
) -> None:
    bf16 = plan(values)
    assert bf16.num_parameters == num_parameters
    assert bf16.kv_bytes_per_token == kv_kib_per_token << 10
    assert bf16.bytes_per_block == BLOCK_SIZE * kv_kib_per_token << 10
    fp8 = plan(values, kv_format=Format.FP8)
    assert fp8.kv_bytes_per_token == kv_kib_per_token << 9


@pytest.mark.parametrize(("shape", "name"), [("8b", "llama-3.1-8b"), ("70b", "llama-3.1-70b")])
def test_simulated_gpus_have_the_published_models(shape: str, name: str) -> None:
    config, simulated = decoder_config(published(name), "config.json"), MODELS[shape]
    for field in dataclasses.fields(ModelShape):
        expected = (
            published(name)["vocab_size"] if field.name == "vocab_size" else getattr(config, field.name)
        )
        assert getattr(simulated, field.name) == expected
    assert simulated.kv_bytes_per_token(DType.BF16) == plan(published(name)).kv_bytes_per_token


def test_seventy_billion_in_bf16_need_more_than_one_device_and_say_how_many() -> None:
    llama = published("llama-3.1-70b")
    one = plan(llama)
    assert one.problem() is not None
    assert "141.2 GB of weights" in str(one.problem())
    assert one.remedy() == "it needs TP >= 4"
    assert not plan(llama, tensor_parallel=2).fits
    four = plan(llama, tensor_parallel=4)
    assert four.fits
    assert four.problem() is None


def test_the_deployment_of_the_catalogue_fits_eight_devices_and_leaves_most_of_them_for_kv() -> None:
    eight = plan(
        published("llama-3.1-70b"), tensor_parallel=8, weight_format=Format.FP8, kv_format=Format.FP8
    )
    # 68.5 G of matrices at one byte and 2.1 G of embeddings at two, over eight devices.
    assert eight.weight_bytes == pytest.approx((68.45e9 + 2 * 2.10e9) / 8 + 0.07e9, rel=0.01)
    assert eight.bytes_per_block == BLOCK_SIZE * (160 << 10) // 8
    assert eight.num_blocks * BLOCK_SIZE > 20 * eight.max_model_len


def test_a_context_that_does_not_fit_is_told_with_one_that_does() -> None:
    tight = plan(published("llama-3.1-8b"), device_gb=24)
    assert tight.problem() is not None
    needs, shorter = tight.remedy().split(", ")
    assert needs == "it needs TP >= 2"
    length = int(shorter.removeprefix("or a max_model_len of at most "))
    assert plan(published("llama-3.1-8b"), device_gb=24, max_model_len=length).fits


def test_what_no_number_of_devices_holds_is_told() -> None:
    assert plan(published("llama-3.1-70b"), device_gb=1).remedy() == "no TP is enough"


def test_kv_heads_are_on_several_devices_where_there_are_fewer() -> None:
    eight, sixteen = (plan(published("llama-3.1-70b"), tensor_parallel=ranks) for ranks in (8, 16))
    assert sixteen.bytes_per_block == eight.bytes_per_block
    assert tensor_parallel_degrees(eight.config) == [1, 2, 4, 8, 16, 32, 64]
    assert tensor_parallel_degrees(decoder_config(QWEN2_5_7B, "config.json")) == [1, 2, 4]


def test_degrees_of_a_config_with_absurdly_many_heads_take_no_time() -> None:
    many = published("llama-3.1-8b") | {"num_attention_heads": 2**30, "head_dim": 2, "intermediate_size": 8}
    assert tensor_parallel_degrees(decoder_config(many, "config.json")) == [1, 2, 4, 8]


@pytest.mark.parametrize("ranks", [3, 5, 6, 128])
def test_heads_that_cannot_be_split_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel {ranks} does not split 32 heads, 8 KV heads"):
        plan(published("llama-3.1-8b"), tensor_parallel=ranks)


def test_all_bad_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"device_bytes .* got 0; max_num_seqs .* got -1; memory_share"):
        Deployment(device_bytes=0, max_num_seqs=-1, memory_share=1.5)


@settings(deadline=None, max_examples=40)
@given(
    device_gb=st.integers(1, 200),
    weight_format=st.sampled_from(Format),
    kv_format=st.sampled_from(Format),
    max_model_len=st.integers(1, 131_072),
    name=st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b"]),
)
def test_more_devices_never_hold_less_and_the_remedy_is_the_fewest_that_fit(
    device_gb: int, weight_format: Format, kv_format: Format, max_model_len: int, name: str
) -> None:
    values = published(name)
    deployment = Deployment(
        device_bytes=device_gb * GB,
        weight_format=weight_format,
        kv_format=kv_format,
        max_model_len=max_model_len,
    )
    config = decoder_config(values, "config.json")
    plans = [
        MemoryPlan(config, values["vocab_size"], dataclasses.replace(deployment, tensor_parallel=ranks))
        for ranks in tensor_parallel_degrees(config)
    ]
    blocks = [each.num_blocks for each in plans]
    assert blocks == sorted(blocks)
    assert all(each.weight_bytes + each.step_bytes + each.room_bytes == each.usable_bytes for each in plans)
    fitting = [each.deployment.tensor_parallel for each in plans if each.fits]
    if fitting[:1] != [1]:
        expected = f"it needs TP >= {fitting[0]}" if fitting else "no TP is enough"
        assert plans[0].remedy().startswith(expected)


def test_the_matrices_of_all_devices_are_the_matrices_of_one() -> None:
    values = published("llama-3.1-70b")
    one, eight = plan(values), plan(values, tensor_parallel=8)
    # What is whole on every device: norms of two a layer and one more, and the rotary table.
    whole = 4 * ((2 * 80 + 1) * 8192 + one.max_model_len * 128)
    assert one.weight_bytes - whole == 8 * (eight.weight_bytes - whole)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Every tensor that an object holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of([*value.values()])
    elif dataclasses.is_dataclass(value):
        yield from tensors_of([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif type(value).__module__.startswith("workers.models"):
        yield from tensors_of(vars(value) if hasattr(value, "__dict__") else [])


def held_bytes(value: object) -> int:
    tensors = {id(tensor): tensor for tensor in tensors_of(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def on_this_machine(config: Any, vocab_size: int, dtype: torch.dtype, **limits: int) -> MemoryPlan:
    stored = Format.FP32 if dtype is torch.float32 else Format.BF16
    deployment = Deployment(
        device_bytes=GB, weight_format=stored, kv_format=stored, output_copied=can_pack(dtype), **limits
    )
    return MemoryPlan(config, vocab_size, deployment)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_the_plan_is_what_is_allocated(tmp_path: Path, family: str, form: str) -> None:
    config, tensors = CONFIGS[family], make_tensors(CONFIGS[family])
    if form == "gguf":
        path = write_gguf(tmp_path / "model.gguf", config, tensors, GGMLQuantizationType.Q8_0)
    else:
        path = write_safetensors(tmp_path, config, tensors)
    for dtype in (torch.float32, torch.bfloat16):
        with open_weights(path) as weights, torch.inference_mode():
            model = Decoder(weights, 256, dtype)
            planned = on_this_machine(weights.config, weights.vocab_size, dtype, max_model_len=256)
        assert planned.num_parameters == sum(array.size for array in tensors.values())
        assert planned.weight_bytes == held_bytes(model)
        size = (BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
        pool = KVMemory(3, 0, num_layers=model.config.num_layers, block_shape=size, dtype=dtype)
        assert 3 * planned.bytes_per_block == held_bytes(pool.device)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        # A view has the memory of what it was made from.
        given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors_of([args, kwargs])}
        for tensor in tensors_of(result):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in given:
                self._live[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("num_seqs", [4, 512])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_step_takes_no_more_than_planned_and_not_much_less(
    tmp_path: Path, family: str, num_seqs: int
) -> None:
    path = write_safetensors(tmp_path, CONFIGS[family], make_tensors(CONFIGS[family]))
    runner = TorchModelRunner(path, num_threads=1)
    runner.initialize_kv_cache(64)
    limits = SchedulerConfig(max_model_len=512, max_num_seqs=num_seqs, max_num_batched_tokens=512)
    prompts, _ = worst_batches(limits, VOCAB_SIZE)
    with LiveBytes() as live:
        runner.execute(prompts)
    planned = on_this_machine(
        decoder_config(CONFIGS[family], "config.json"),
        VOCAB_SIZE,
        torch.bfloat16,
        max_num_batched_tokens=512,
        max_num_seqs=num_seqs,
    )
    print(family, num_seqs, live.peak, planned.step_bytes, planned.step_bytes / live.peak)
    assert live.peak <= planned.step_bytes <= 2 * live.peak


def test_files_larger_than_memory_are_refused_in_figures(tmp_path: Path) -> None:
    values = published("llama-3.1-70b")
    config = decoder_config(values, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(values))
    names = HuggingFaceNames(config.architecture, ["model.embed_tokens.weight"], "model.safetensors")
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensor_shapes(config, values["vocab_size"]):
        end = offset + 2 * prod(shape)
        header[names(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)  # nothing of it is on the disk
    limits: dict[str, Any] = {"max_model_len": None, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    with (
        open_weights(path) as weights,
        pytest.raises(ValueError, match=r"does not fit: 141\.2 GB of weights"),
    ):
        check_fits(weights, 24 * GB, deterministic=False, **limits)
