"""Decodes by graphs against the same steps without: the same logits, and the same KV in every block.

On a GPU they are CUDA graphs; in the interpreter what is recorded is computed anew, from the same buffers.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.dispatch import triton_operations
from tests.decoder_files import CONFIGS, make_prompt, make_tensors, write_safetensors
from tests.triton.test_device_runner import request
from workers.batch import ScheduledSequence
from workers.decode_graphs import CudaGraphRecorder, Recorder
from workers.device_forward import DeviceForward
from workers.kv_memory import KVMemory
from workers.model_step import ModelStep, StepLimits, prepare_step
from workers.models.device_decoder import DeviceDecoder
from workers.models.open_weights import open_weights
from workers.models.sharding import Sharding
from workers.request import Request

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUM_BLOCKS = 12


class Again:
    def __init__(self, compute: Callable[[], None]) -> None:
        compute()
        self._compute = compute

    def replay(self) -> None:
        self._compute()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[DeviceDecoder]:
    folder: Path = tmp_path_factory.mktemp("gemma")
    path = write_safetensors(folder, CONFIGS["gemma3"], make_tensors(CONFIGS["gemma3"]))
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    with open_weights(path) as weights, torch.inference_mode():
        yield DeviceDecoder(weights, device, dtype, triton_operations(), Sharding(weights.config))


class Run:
    """Prompts of three sequences, then decodes."""

    def __init__(self, model: DeviceDecoder, record: Recorder | None) -> None:
        self._model = model
        config = model.config
        self.memory = KVMemory(
            NUM_BLOCKS,
            0,
            num_layers=config.num_layers,
            block_shape=(16, config.num_kv_heads, config.head_dim),
            dtype=model.dtype,
            device=model.device,
        )
        self._forward = DeviceForward(model)
        if record is not None:
            self._forward.record_graphs(self.memory.device, [1, 2, 4], record)
            assert not self.memory.device.keys.any(), "padding is stored nowhere"
        prompt = make_prompt(40)
        self.requests = [
            request(prompt[:15], [3, 8]),
            request(prompt[15:], [5, 1]),
            request(prompt[4:9], [0, 2]),
        ]

    def logits(self) -> Tensor:
        found = [self._step(self.requests, prompts=True)]
        found += [self._step(self.requests[:count]) for count in (3, 2, 1, 3)]
        return torch.cat(found)

    def _step(self, requests: list[Request], prompts: bool = False) -> Tensor:
        scheduled = []
        for each in requests:
            count = len(each.prompt_token_ids) if prompts else 1
            scheduled.append(ScheduledSequence(each, count, samples=True))
        limits = StepLimits(self._model.vocab_size, NUM_BLOCKS, self._model.max_model_len)
        step: ModelStep = prepare_step(scheduled, limits)
        logits = self._forward.compute_logits(step, self.memory.device).cpu().clone()
        for part in scheduled:
            part.request.num_computed_tokens += part.num_scheduled_tokens
            part.request.output_token_ids.append(11)
        return logits


def test_replays_give_the_logits_and_the_kv_of_steps_without_graphs(model: DeviceDecoder) -> None:
    with torch.inference_mode():
        eager = Run(model, None)
        expected = eager.logits()
        recorded = Run(model, Again if INTERPRETED else CudaGraphRecorder())
        actual = recorded.logits()
        assert expected.std() > 0.1
        # Attention splits keys by the width of the tables, so on a GPU sums differ in their order.
        atol = 1e-5 if INTERPRETED else 0.1
        torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-3)
        for mine, theirs in (
            (recorded.memory.device.keys, eager.memory.device.keys),
            (recorded.memory.device.values, eager.memory.device.values),
        ):
            torch.testing.assert_close(mine.cpu(), theirs.cpu(), atol=atol, rtol=1e-3)
        used = {block for each in eager.requests for block in each.block_table}
        unused = [block for block in range(NUM_BLOCKS) if block not in used]
        assert not recorded.memory.device.keys[:, unused].any()
