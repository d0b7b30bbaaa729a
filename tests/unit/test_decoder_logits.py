"""Small random models of each family: against Hugging Face's logits, in every format, and bit for bit.

What tests/fixtures/decoder_logits.json holds, and how it was made, is in make_decoder_logits.py beside it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.decoder_files import CONFIGS, VOCAB_SIZE, make_tensors, write_gguf, write_safetensors
from workers.batch import ScheduledSequence
from workers.block_pool import BLOCK_SIZE
from workers.model_runner import TorchModelRunner
from workers.request import Request

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "decoder_logits.json").read_text())
PROMPT: list[int] = FIXTURE["prompt_token_ids"]
FAMILIES = [*CONFIGS]
# Every third layer cannot be global in a GGUF file of Gemma 3: that is every sixth.
GGUF_FAMILIES = ["llama", "qwen2", "qwen3"]


def load(path: Path, deterministic: bool = True) -> TorchModelRunner:
    runner = TorchModelRunner(path, deterministic=deterministic, num_threads=1, linear="bf16")
    runner.initialize_kv_cache(32)
    return runner


def logits_at(runner: TorchModelRunner, positions: list[int], chunk: int | None = None) -> Tensor:
    """Prefills the prompt in chunks, then decodes at `positions` over the blocks of that prefill."""
    blocks = list(range(2, 2 + -(-len(PROMPT) // BLOCK_SIZE)))[::-1]

    def request(length: int) -> Request:
        return Request(
            request_id=bytes(16),
            attempt=1,
            priority=PriorityClass.INTERACTIVE,
            prompt_token_ids=PROMPT[:length],
            sampling=SamplingParams(max_tokens=8),
            reply_partition=0,
            block_table=blocks,
        )

    whole = request(len(PROMPT))
    while whole.num_computed_tokens < len(PROMPT):
        left = len(PROMPT) - whole.num_computed_tokens
        num_tokens = min(chunk or left, left)
        runner.compute_logits([ScheduledSequence(whole, num_tokens, samples=num_tokens == left)])
        whole.num_computed_tokens += num_tokens
    decodes = []
    for position in positions:
        decode = request(position + 1)
        decode.num_computed_tokens = position
        decodes.append(ScheduledSequence(decode, 1, samples=True))
    return runner.compute_logits(decodes)


def errors(family: str, runner: TorchModelRunner, chunk: int | None) -> tuple[float, float]:
    """The largest errors of a top logit and of a log-sum-exp, against the fixture."""
    expected = FIXTURE["models"][family]
    logits = logits_at(runner, [entry["position"] for entry in expected], chunk)
    of_tops = [
        (row[entry["top_ids"]] - torch.tensor(entry["top_logits"])).abs().max().item()
        for entry, row in zip(expected, logits, strict=True)
    ]
    of_sums = [
        abs(row.logsumexp(0).item() - entry["logsumexp"]) for entry, row in zip(expected, logits, strict=True)
    ]
    print(family, chunk, max(of_tops), max(of_sums))
    return max(of_tops), max(of_sums)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family's weights in fp32; Llama's in three shards."""
    paths = {}
    for family, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(family)
        shards = 3 if family == "llama" else 1
        paths[family] = write_safetensors(folder, config, make_tensors(config), shards)
    return paths


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_hugging_face(files: dict[str, Path], family: str, chunk: int | None) -> None:
    of_tops, of_sums = errors(family, load(files[family]), chunk)
    assert of_tops < 1e-4
    assert of_sums < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bf16_logits_are_near_hugging_face(files: dict[str, Path], family: str) -> None:
    of_tops, of_sums = errors(family, load(files[family], deterministic=False), 40)
    assert of_tops < 0.5
    assert of_sums < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_logits_do_not_depend_on_chunks(files: dict[str, Path], family: str) -> None:
    positions = [5, 30, 88]
    runner = load(files[family])
    whole = logits_at(runner, positions)
    assert torch.equal(logits_at(runner, positions, 11), whole)
    assert torch.equal(logits_at(runner, positions[:1], 40)[0], whole[0])


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_is_the_same_model(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    of_tops, of_sums = errors(
        family, load(write_gguf(tmp_path / "m.gguf", config, make_tensors(config))), None
    )
    assert of_tops < 1e-4
    assert of_sums < 1e-4


def six_layers() -> dict[str, Any]:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return CONFIGS["gemma3"] | {"num_hidden_layers": 6, "layer_types": kinds, "query_pre_attn_scalar": 32}


def test_a_gguf_file_of_gemma_is_the_same_model(tmp_path: Path) -> None:
    """Of six layers, so that one attends globally: with linear scaling, which these two alone say."""
    config = six_layers()
    tensors = make_tensors(config)
    published = load(write_safetensors(tmp_path, config, tensors))
    gguf = load(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert torch.allclose(logits_at(published, [3, 50, 89]), logits_at(gguf, [3, 50, 89]), atol=1e-4)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0"])
def test_quantized_gguf_files_are_what_they_dequantize_to(tmp_path: Path, quantization: str) -> None:
    """To the bit the model whose fp32 weights went through the quantization beforehand."""
    config, kind = CONFIGS["qwen3"], GGMLQuantizationType[quantization]
    tensors = make_tensors(config)
    rounded = {
        name: dequantize(quantize(array, kind), kind) if array.ndim == 2 else array
        for name, array in tensors.items()
    }
    expected = load(write_safetensors(tmp_path, config, rounded))
    actual = load(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    assert torch.equal(logits_at(actual, [0, 44, 89]), logits_at(expected, [0, 44, 89]))
    _, of_sums = errors("qwen3", actual, None)
    assert 0 < of_sums < 0.3


def test_half_precision_safetensors_load(tmp_path: Path) -> None:
    tensors = {name: array.astype(np.float16) for name, array in make_tensors(CONFIGS["llama"]).items()}
    of_tops, _ = errors("llama", load(write_safetensors(tmp_path, CONFIGS["llama"], tensors)), None)
    assert of_tops < 2e-2


def fp8(array: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of F8_E4M3 of array / scales."""
    values = torch.from_numpy(array / scales).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "deepseek"])
def test_fp8_weights_are_those_that_their_scales_say(tmp_path: Path, kind: str) -> None:
    """The model in FP8 equals, to the bit, one whose fp32 weights were rounded to FP8 beforehand."""
    config = CONFIGS["llama"]
    stored, rounded = {}, {}
    block = (32, 48)  # 96 rows and 64 columns: both have a last block that is cut off, or none
    for name, array in make_tensors(config).items():
        stored[name] = rounded[name] = array
        if "proj" not in name:
            continue
        rows, columns = array.shape
        if kind == "tensor":
            scales = np.full((1, 1), np.abs(array).max() / 448, np.float32)
            spread, kept = scales, scales.reshape(1)
        elif kind == "channel":
            spread = kept = (np.abs(array).max(1, keepdims=True) / 448).astype(np.float32)
        else:
            kept = np.array(
                [
                    [
                        np.abs(array[i : i + block[0], j : j + block[1]]).max() / 448
                        for j in range(0, columns, block[1])
                    ]
                    for i in range(0, rows, block[0])
                ],
                np.float32,
            )
            spread = kept.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
        bits = fp8(array, spread)
        stored[name] = bits
        stored[f"{name}_scale_inv" if kind == "deepseek" else f"{name}_scale"] = kept
        rounded[name] = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy() * spread
    if kind == "deepseek":
        quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*block]}
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": kind}
        if kind == "block":
            weights["block_structure"] = [*block]
        quantization = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": weights}},
        }
    (tmp_path / "rounded").mkdir()
    expected = load(write_safetensors(tmp_path / "rounded", config, rounded))
    actual = load(write_safetensors(tmp_path, config | {"quantization_config": quantization}, stored, 2))
    positions = [0, 44, 89]
    assert torch.equal(logits_at(actual, positions), logits_at(expected, positions))
    _, of_sums = errors("llama", actual, None)
    assert 0 < of_sums < 0.15


def test_the_vocabulary_is_the_embeddings(files: dict[str, Path]) -> None:
    assert load(files["qwen2"]).vocab_size == VOCAB_SIZE


def test_a_model_that_does_not_fit_is_told_before_it_is_loaded(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.model_runner.available_bytes", lambda: 1 << 20)
    with pytest.raises(ValueError, match="the model does not fit"):
        load(files["llama"])
