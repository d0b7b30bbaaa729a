"""What the fast mode loses against full precision, for each way to multiply, on texts of many kinds.

Along texts that people wrote, all tokens given, and along what the model itself writes in full precision.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.int8_tiles import HAS_VNNI, ONEDNN_HAS_INT8
from tests.model_files import gemma_folder
from workers.block_pool import BLOCK_SIZE
from workers.model_step import ModelStep
from workers.models.decoder import Decoder
from workers.models.decoder_weights import DecoderWeights
from workers.models.fast_linear import LinearKind, same_kind
from workers.models.gemma_fast import FastGemmaModel
from workers.models.layers import KVCache
from workers.models.open_weights import open_weights

FIXTURE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "quality_tokens.json").read_text()
)
MAX_TOKENS = 256
HERE = {LinearKind.INT8: HAS_VNNI, LinearKind.INT8_ONEDNN: ONEDNN_HAS_INT8}  # the others are everywhere
# How often the most likely token must be the same along the texts. One token in a hundred there has a second
# one within 0.02 of the first, which even bf16 swaps; torch's and oneDNN's int8 have one scale a channel,
# and lose a little more.
AGREEMENT = {
    LinearKind.INT8: 0.985,
    LinearKind.BF16: 0.985,
    LinearKind.INT8_ONEDNN: 0.97,
    LinearKind.WEIGHT_ONLY: 0.97,
}


def written(name: str) -> list[int]:
    ids: list[int] = FIXTURE[name]["token_ids"]
    return ids


def continued(name: str) -> list[int]:
    """The beginning of a text and the model's own words; the last token has nothing to predict."""
    entry = FIXTURE[name]
    return [*entry["token_ids"][: entry["num_prompt_tokens"]], *entry["greedy"][:-1]]


class DenseAttention:
    """Causal attention of one sequence over its own keys. Texts are shorter than the sliding window."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (key, value))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, is_causal=True, scale=1.0
        )
        return attended.transpose(0, 1)


@dataclass
class Reference:
    """Logits in full precision, [num_tokens, vocab_size]: of the texts, and greedy tokens along the model's
    own."""

    texts: dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    return open_weights(gemma_folder() / "model.gguf")


@pytest.fixture(scope="module")
def exact(weights: DecoderWeights) -> Reference:
    with torch.inference_mode():
        model = Decoder(weights, MAX_TOKENS)

        def logits(ids: list[int]) -> Tensor:
            positions = torch.arange(len(ids))
            return model.compute_logits(model.forward(torch.tensor(ids), positions, DenseAttention()))

        for name in FIXTURE:
            own = FIXTURE[name]["greedy"]
            assert logits(continued(name))[-len(own) :].argmax(1).tolist() == own, name
        return Reference({name: logits(written(name)) for name in FIXTURE})


def fast_logits(model: FastGemmaModel, ids: list[int]) -> Tensor:
    """Logits of all tokens, computed as one prompt chunk."""
    config = model.config
    rows = torch.arange(len(ids))
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    shape = (config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
    cache = KVCache(keys, values)
    step = ModelStep(
        token_ids=torch.tensor(ids),
        positions=rows,
        slot_mapping=rows,
        block_tables=[list(range(num_blocks))],
        seq_lens=[len(ids)],
        query_start_loc=[0, len(ids)],
        sampled_rows=rows,
    )
    return model.compute_logits(step, cache)


def test_the_fixture_is_of_many_kinds() -> None:
    assert len(FIXTURE) >= 8
    assert sum(len(entry["token_ids"]) for entry in FIXTURE.values()) >= 1400
    assert sum(len(entry["greedy"]) for entry in FIXTURE.values()) >= 400
    # Not one phrase over and over.
    assert all(len(set(entry["greedy"])) >= 8 for entry in FIXTURE.values())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.skipif(not HERE.get(kind, True), reason=f"this processor has no {kind}")
        )
        for kind in LinearKind
    ],
)
def test_fast_mode_is_near_full_precision(
    exact: Reference, weights: DecoderWeights, kind: LinearKind
) -> None:
    with torch.inference_mode():
        model = FastGemmaModel(weights, lambda rows, columns: same_kind(kind), MAX_TOKENS)
        divergence = agreeing_on_texts = num_tokens = agreeing = num_own = 0.0
        for name, expected in exact.texts.items():
            actual = fast_logits(model, written(name))
            log_p, log_q = expected.log_softmax(1), actual.log_softmax(1)
            divergence += (log_p.exp() * (log_p - log_q)).sum().item()
            agreeing_on_texts += (expected.argmax(1) == actual.argmax(1)).sum().item()
            num_tokens += len(expected)
            own = torch.tensor(FIXTURE[name]["greedy"])
            agreeing += (fast_logits(model, continued(name))[-len(own) :].argmax(1) == own).sum().item()
            num_own += len(own)
    print(
        f"{kind}: KL {divergence / num_tokens:.5f} over {num_tokens:.0f} tokens, most likely token the same: "
        f"{agreeing_on_texts / num_tokens:.2%} of them, and {agreeing / num_own:.2%} of {num_own:.0f} of the "
        "model's own"
    )
    assert divergence / num_tokens <= 0.01
    assert agreeing_on_texts / num_tokens >= AGREEMENT[kind]
    assert agreeing / num_own >= 0.985
