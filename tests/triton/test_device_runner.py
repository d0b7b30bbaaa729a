"""Models by the kernels of a GPU against the same files in the CPU's deterministic fp32.

In the interpreter they compute in fp32 too: what differs is the order of sums. On a GPU it is bf16.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from kernels.dispatch import PLAIN
from schemas.priority import PriorityClass
from schemas.records import LogitBias, SamplingParams
from tests.decoder_files import CONFIGS, make_prompt, make_tensors, write_gguf, write_safetensors
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.model_runner import TorchModelRunner
from workers.request import Request

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROMPT = make_prompt(45)
NUM_BLOCKS = 16
# Largest error of a logit, whose standard deviation is about 1; and of all, as relative RMSE.
MOST, RMSE = (2e-4, 2e-5) if INTERPRETED else (0.5, 0.05)


@contextmanager
def on_device(path: Path, **settings: Any) -> Iterator[TorchModelRunner]:
    runner = TorchModelRunner(path, num_threads=1, device="cpu" if INTERPRETED else "cuda", **settings)
    try:
        runner.initialize_kv_cache(NUM_BLOCKS, 4)
        yield runner
    finally:
        runner.close()


def on_cpu(path: Path) -> TorchModelRunner:
    runner = TorchModelRunner(path, num_threads=1, deterministic=True)
    runner.initialize_kv_cache(NUM_BLOCKS, 4)
    return runner


def request(tokens: list[int], block_table: list[int], **sampling: Any) -> Request:
    return Request(
        request_id=bytes([block_table[0]]) * 16,
        attempt=1,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=8, **sampling),
        reply_partition=0,
        block_table=block_table,
    )


def step(runner: TorchModelRunner, *parts: tuple[Request, int]) -> Tensor:
    """So many tokens of each."""
    scheduled = []
    for each, count in parts:
        known = len(each.prompt_token_ids) + len(each.output_token_ids)
        scheduled.append(ScheduledSequence(each, count, each.num_computed_tokens + count == known))
    logits = runner.compute_logits(scheduled).cpu()
    for each, count in parts:
        each.num_computed_tokens += count
        if len(each.prompt_token_ids) + len(each.output_token_ids) == each.num_computed_tokens:
            each.output_token_ids.append(7)
    return logits


def all_kinds_of_steps(runner: TorchModelRunner) -> Tensor:
    """A prompt in chunks; beside its second chunk a whole prompt; decodes of both; then one that finds the
    first's two whole blocks cached, beside their decodes; then decodes alone; then a swap in between."""
    long, short = request(PROMPT, [9, 3, 12, 5]), request(PROMPT[20:29], [7])
    found = [step(runner, (long, 20)), step(runner, (short, 9), (long, 25))]
    hit = request([*PROMPT[:32], 5, 6, 8], [9, 3, 2])
    hit.num_computed_tokens = 32
    found.append(step(runner, (long, 1), (short, 1)))
    found.append(step(runner, (long, 1), (short, 1), (hit, 3)))
    found.append(step(runner, (long, 1), (short, 1), (hit, 1)))
    runner.execute(SchedulerOutput(swap_out=[(9, 0), (3, 1), (2, 3)], swap_in=[(0, 11), (1, 1), (3, 0)]))
    hit.block_table = [11, 1, 0]
    found.append(step(runner, (hit, 1)))
    return torch.cat(found)


def assert_close(actual: Tensor, expected: Tensor, most: float = MOST, rmse: float = RMSE) -> None:
    difference = actual - expected
    relative = (difference.square().mean() / expected.square().mean()).sqrt().item()
    print(f"relative RMSE {relative:.2e}, max {difference.abs().max().item():.2e}")
    assert expected.std() > 0.1
    assert difference.abs().max() < most
    assert relative < rmse


@pytest.mark.parametrize("family", [*CONFIGS])
def test_logits_are_those_of_the_cpu(tmp_path: Path, family: str) -> None:
    path = write_safetensors(tmp_path, CONFIGS[family], make_tensors(CONFIGS[family]), 2)
    expected = all_kinds_of_steps(on_cpu(path))
    assert len(expected) == 11
    with on_device(path) as runner:
        assert_close(all_kinds_of_steps(runner), expected)


def test_a_gguf_file_is_dequantized(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", CONFIGS["llama"], make_tensors(CONFIGS["llama"]), GGMLQuantizationType.Q8_0
    )
    with on_device(path) as runner:
        assert_close(all_kinds_of_steps(runner), all_kinds_of_steps(on_cpu(path)))


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Both have the one KV head, and not as many rows of the vocabulary."""
    if not INTERPRETED and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = CONFIGS["qwen2"] | {"num_key_value_heads": 1, "vocab_size": 323}
    path = write_safetensors(tmp_path, config, make_tensors(config))
    with on_device(path, num_ranks=2) as runner:
        assert_close(all_kinds_of_steps(runner), all_kinds_of_steps(on_cpu(path)))


def fp8_file(folder: Path, block: tuple[int, int] | None) -> Path:
    """Llama in FP8, with scales by row or, as DeepSeek's files have them, by block."""
    config, tensors = CONFIGS["llama"], make_tensors(CONFIGS["llama"])
    stored = {}
    for name, array in tensors.items():
        stored[name] = array
        if "proj" not in name:
            continue
        rows, columns = array.shape
        height, width = block or (1, columns)
        scales = np.array(
            [
                [np.abs(array[i : i + height, j : j + width]).max() / 448 for j in range(0, columns, width)]
                for i in range(0, rows, height)
            ],
            np.float32,
        )
        spread = scales.repeat(height, 0)[:rows].repeat(width, 1)[:, :columns]
        bits = torch.from_numpy(array / spread).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        stored[name], stored[f"{name}_scale_inv" if block else f"{name}_scale"] = bits, scales
    quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
    if block:
        quantization["weight_block_size"] = [*block]
    return write_safetensors(folder, config | {"quantization_config": quantization}, stored)


@pytest.mark.parametrize(
    ("block", "num_ranks"), [(None, 1), ((32, 16), 1), ((32, 24), 1), ((32, 48), 2)], ids=str
)
def test_fp8_weights_are_those_that_their_scales_say(
    tmp_path: Path, block: tuple[int, int] | None, num_ranks: int
) -> None:
    """Blocks of 48 columns are cut off by two ranks, and those of 24 by tiles: they are dequantized."""
    if not INTERPRETED and torch.cuda.device_count() < num_ranks:
        pytest.skip("needs two GPUs")
    path = fp8_file(tmp_path, block)
    with on_device(path, num_ranks=num_ranks) as runner:
        assert_close(all_kinds_of_steps(runner), all_kinds_of_steps(on_cpu(path)))


def test_an_fp8_kv_cache_is_that_of_the_plain_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 has three bits behind the first: how far that is from fp32 says little of a model of noise.

    The interpreter halves what is rounded up to a power of two (0.4997 becomes 0.25): 3 of 100 numbers.
    """
    path = write_safetensors(tmp_path, CONFIGS["qwen3"], make_tensors(CONFIGS["qwen3"]))
    with on_device(path, fp8_kv=True) as runner:
        assert runner.bytes_per_block * 4 == on_cpu(path).bytes_per_block  # of fp32
        actual = all_kinds_of_steps(runner)
    monkeypatch.setattr("workers.model_shard.triton_operations", lambda: PLAIN)
    with on_device(path, fp8_kv=True) as runner:
        most, rmse = (1.5, 0.2) if INTERPRETED else (0.5, 0.1)
        assert_close(actual, all_kinds_of_steps(runner), most, rmse)
    assert_close(actual, all_kinds_of_steps(on_cpu(path)), 1.5, 0.2)


# What the CPU's sampler can, by rows that it takes over and rows that stay on the device.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    {"temperature": 0.7, "seed": 1, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": [LogitBias(token_id=17, bias=100.0)]},
    {"temperature": 0.7, "seed": 3, "logprobs": 4},
    {"temperature": 0.7, "seed": 4, "min_tokens": 3, "stop_token_ids": [9]},
]


def test_what_is_sampled_is_what_the_cpu_samples(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, CONFIGS["qwen3"], make_tensors(CONFIGS["qwen3"]))

    def sample(runner: TorchModelRunner, chosen: list[dict[str, Any]]) -> Any:
        scheduled = [
            ScheduledSequence(request(PROMPT[at : at + 8], [at], **sampling), 8, samples=True)
            for at, sampling in enumerate(chosen)
        ]
        output = runner.execute(SchedulerOutput(scheduled))
        return output.token_ids, output.logprobs

    cpu = on_cpu(path)
    with on_device(path, eos_token_ids={1}) as runner:
        for chosen in (SAMPLING, SAMPLING[:3], SAMPLING[3:5]):
            tokens, logprobs = sample(runner, chosen)
            expected, told = sample(cpu, chosen)
            if INTERPRETED:  # where bf16 does not turn near ties
                assert tokens == expected
            assert len(logprobs) == len(told)
            for mine, theirs in zip(logprobs, told, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None and INTERPRETED:
                    assert mine.top_token_ids == theirs.top_token_ids
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert 17 in sample(runner, SAMPLING[5:])[0]
