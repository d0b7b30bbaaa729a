"""Whether a model fits this machine, before any of its weights is read."""

import torch

from workers.block_pool import BLOCK_SIZE
from workers.exact_forward import TILE_ROWS
from workers.memory_plan import Deployment, Format, MemoryPlan
from workers.models.decoder_config import Architecture
from workers.models.decoder_weights import DecoderWeights
from workers.models.layers import can_pack
from workers.pool_sizes import MARGIN_BYTES


def check_fits(
    weights: DecoderWeights,
    available_bytes: int,
    *,
    deterministic: bool,
    max_model_len: int | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_ranks: int = 1,
) -> None:
    """Raises ValueError where weights, a step and one KV block take more than there is for each rank.

    How many KV blocks there are is decided once the weights are loaded (`pool_sizes.plan_pools`).
    """
    # Gemma's fast matrices take a byte a weight and more, by how they are multiplied.
    gemma_fast = weights.config.architecture is Architecture.GEMMA3 and num_ranks == 1
    fast = Format.INT8 if gemma_fast else Format.BF16
    plan = MemoryPlan(
        weights.config,
        weights.vocab_size,
        Deployment(
            device_bytes=max(1, (available_bytes - MARGIN_BYTES) // num_ranks),
            tensor_parallel=num_ranks,
            memory_share=1.0,
            weight_format=Format.FP32 if deterministic else fast,
            kv_format=Format.FP32 if deterministic else Format.BF16,
            max_model_len=max_model_len,
            # Deterministic mode computes a few tokens at a time.
            max_num_batched_tokens=TILE_ROWS if deterministic else max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            min_kv_tokens=BLOCK_SIZE,
            output_copied=can_pack(torch.float32 if deterministic else torch.bfloat16),
        ),
    )
    if problem := plan.problem():
        raise ValueError(f"{weights.path}: {problem}")
