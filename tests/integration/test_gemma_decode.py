"""Decodes of the real model in one call, against the same kernels called one by one."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.int8_matmul import supports_panels
from tests.model_files import gemma_folder
from workers.block_pool import BLOCK_SIZE
from workers.model_step import ModelStep
from workers.models.fast_linear import LinearKind, same_kind
from workers.models.gemma_fast import FastGemmaModel
from workers.models.layers import KVCache
from workers.models.open_weights import open_weights

PROMPT: list[int] = json.loads((Path(__file__).parents[1] / "fixtures" / "gemma3_logits.json").read_text())[
    "prompt_token_ids"
]
MAX_TOKENS = 1024
# One block and less, at a block's border, past the sliding window.
LENGTHS = [1, 5, 16, 17, 100, 511, 512, 513, 600, 3, 48]

pytestmark = pytest.mark.skipif(
    not supports_panels(32, 64), reason="this processor has no AVX-512 VNNI: decodes are separate calls"
)


@pytest.fixture(scope="module")
def model() -> FastGemmaModel:
    with torch.inference_mode(), open_weights(gemma_folder() / "model.gguf") as weights:
        return FastGemmaModel(weights, lambda rows, columns: same_kind(LinearKind.INT8), MAX_TOKENS)


def tables() -> list[list[int]]:
    """Blocks of each sequence, in no order."""
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    free = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    return [[free.pop() for _ in range(count)] for count in counts]


def step_of(first: list[int], block_tables: list[list[int]]) -> ModelStep:
    """The tokens of each sequence from `first` on, to the end of its length; all sample."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for index, (begin, table) in enumerate(zip(first, block_tables, strict=True)):
        places = range(begin, LENGTHS[index])
        token_ids += [PROMPT[index + place] for place in places]
        positions += places
        slots += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
        starts.append(len(token_ids))
    return ModelStep(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=block_tables,
        seq_lens=LENGTHS[: len(first)],
        query_start_loc=starts,
        sampled_rows=torch.tensor(starts[1:]) - 1,
    )


def decode(model: FastGemmaModel, num_seqs: int, threads: int, in_one_call: bool) -> tuple[Tensor, KVCache]:
    """Logits of the last tokens of some sequences, and the cache after it."""
    config = model.config
    block_tables = tables()
    shape = (config.num_layers, sum(map(len, block_tables)), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
    cache = KVCache(keys, values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            model.compute_logits(step_of([0] * len(LENGTHS), block_tables), cache)
            last = [length - 1 for length in LENGTHS[:num_seqs]]
            step = step_of(last, block_tables[:num_seqs])
            return model.compute_logits(step, cache, in_one_call=in_one_call).clone(), cache
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_seqs", [1, 2, 5, len(LENGTHS)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_call_is_bit_for_bit_what_separate_calls_are(
    model: FastGemmaModel, num_seqs: int, threads: int
) -> None:
    logits, cache = decode(model, num_seqs, threads, in_one_call=True)
    expected, expected_cache = decode(model, num_seqs, threads, in_one_call=False)
    assert torch.equal(logits, expected)
    assert torch.equal(cache.keys, expected_cache.keys)
    assert torch.equal(cache.values, expected_cache.values)
    assert logits.std() > 1
