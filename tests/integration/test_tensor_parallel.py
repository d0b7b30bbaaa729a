"""A model over two processes computes what it computes in one."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from gguf import GGMLQuantizationType
from torch import Tensor

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.decoder_files import CONFIGS, make_prompt, make_tensors, write_gguf, write_safetensors
from tests.rank_process import STEP_TIMEOUT_S, model_options
from tests.service_process import ROOT
from workers.batch import ScheduledSequence
from workers.followers import connect, listen
from workers.model_shard import InitializeKVCache, ModelShard, RankCommand, RunStep
from workers.model_step import StepLimits, prepare_step
from workers.models.open_weights import open_weights
from workers.models.ranks import DistributedRanks
from workers.request import Request

PROMPT = make_prompt(50)
NUM_BLOCKS = 12
# Fewer KV heads than ranks: each rank has the one that there is.
ONE_KV_HEAD = {"num_key_value_heads": 1}


class Model:
    """Rank 0 of a model, alone or with the process that `other` is the stdin of."""

    def __init__(self, path: Path, other: IO[bytes] | None, deterministic: bool) -> None:
        options = model_options(path, deterministic=deterministic, num_ranks=1 if other is None else 2)
        self._other = other
        self._tell(options)
        with open_weights(path) as weights:
            self._shard = ModelShard(options, weights, 0)
        if other is not None:
            self._shard.join(DistributedRanks(exact=deterministic))
        self._execute(InitializeKVCache(NUM_BLOCKS, 4))

    def logits(self) -> Tensor:
        """Of a prompt in two chunks beside another sequence's, and of a decode after it went to the host and
        came back elsewhere."""
        long, short = request(PROMPT, [3, 1, 0, 2]), request(PROMPT[:9], [7])
        logits = [
            self._compute(
                ScheduledSequence(long, 20, samples=False), ScheduledSequence(short, 9, samples=True)
            ),
            self._compute(ScheduledSequence(long, 30, samples=True)),
        ]
        away = list(zip(long.block_table, range(4), strict=True))
        long.block_table = [8, 9, 10, 11]
        self._execute(RunStep(None, away, list(zip(range(4), long.block_table, strict=True))))
        long.output_token_ids.append(11)
        logits.append(self._compute(ScheduledSequence(long, 1, samples=True)))
        return torch.cat(logits)

    def _compute(self, *scheduled: ScheduledSequence) -> Tensor:
        model = self._shard.model
        limits = StepLimits(model.vocab_size, NUM_BLOCKS, model.max_model_len)
        logits = self._execute(RunStep(prepare_step(scheduled, limits)))
        assert logits is not None
        for sequence in scheduled:
            sequence.request.num_computed_tokens += sequence.num_scheduled_tokens
        return logits

    def _execute(self, command: RankCommand) -> Tensor | None:
        self._tell(command)
        return self._shard.execute(command)

    def _tell(self, message: object) -> None:
        if self._other is not None:
            pickle.dump(message, self._other)
            self._other.flush()


def request(tokens: list[int], block_table: list[int]) -> Request:
    return Request(
        request_id=bytes([block_table[0]]) * 16,
        attempt=1,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        reply_partition=0,
        block_table=block_table,
    )


@pytest.fixture(scope="module")
def other() -> Iterator[IO[bytes]]:
    """Rank 1, connected."""
    store, port = listen()
    command = [sys.executable, "-m", "tests.rank_process", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        try:
            connect(store, 2, 0, STEP_TIMEOUT_S)
            assert process.stdin is not None
            yield process.stdin
        finally:
            process.kill()
            dist.destroy_process_group()


@pytest.mark.parametrize("changes", [{}, ONE_KV_HEAD], ids=["two-kv-heads", "one-kv-head"])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_two_processes_give_the_bits_of_one(
    tmp_path: Path, other: IO[bytes], family: str, changes: dict[str, Any]
) -> None:
    config = CONFIGS[family] | changes
    path = write_safetensors(tmp_path, config, make_tensors(config), 2)
    expected = Model(path, None, deterministic=True).logits()
    assert expected.std() > 0.1
    assert torch.equal(Model(path, other, deterministic=True).logits(), expected)


def test_a_gguf_file_is_sharded_while_it_is_read(tmp_path: Path, other: IO[bytes]) -> None:
    """Rows that go to another rank lie between rows that do not, some of them reordered by the converter."""
    config = CONFIGS["llama"] | {"vocab_size": 323}  # of which the ranks cannot have equally many
    path = write_gguf(tmp_path / "m.gguf", config, make_tensors(config), GGMLQuantizationType.Q8_0)
    expected = Model(path, None, deterministic=True).logits()
    assert torch.equal(Model(path, other, deterministic=True).logits(), expected)


@pytest.mark.parametrize("family", [*CONFIGS])
def test_the_fast_mode_differs_by_rounding_alone(tmp_path: Path, other: IO[bytes], family: str) -> None:
    config = CONFIGS[family]
    path = write_safetensors(tmp_path, config, make_tensors(config))
    expected = Model(path, None, deterministic=True).logits()
    actual = Model(path, other, deterministic=False).logits()
    error = (actual - expected).square().mean().sqrt() / expected.std()
    print(family, error.item())
    assert 0 < error < 0.05
