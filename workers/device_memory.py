"""The memory of a GPU: what is free, and whether a model fits it."""

import torch

from kernels.dispatch import has_fp8
from workers.device_pools import reserved_bytes
from workers.memory_plan import Deployment, Format, MemoryPlan
from workers.models.decoder_weights import DecoderWeights


def free_device_bytes(device: torch.device) -> int:
    """What this process may still take of it, memory that torch keeps for itself included."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def check_fits_device(
    weights: DecoderWeights,
    device: torch.device,
    *,
    fp8_kv: bool,
    max_model_len: int | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_ranks: int,
) -> None:
    """To be called before anything is loaded. Raises ValueError where weights, a step and the KV of one
    longest sequence take more than a GPU has free; it says what to change."""
    free, total = torch.cuda.mem_get_info(device)
    plan = device_plan(
        weights,
        max(1, free - reserved_bytes(total)),
        keep_fp8=has_fp8(device),
        fp8_kv=fp8_kv,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        num_ranks=num_ranks,
    )
    if problem := plan.problem():
        raise ValueError(f"{weights.path}: {problem}; {plan.remedy()}")


def device_plan(
    weights: DecoderWeights,
    usable_bytes: int,
    *,
    keep_fp8: bool,
    fp8_kv: bool,
    max_model_len: int | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_ranks: int,
) -> MemoryPlan:
    """Of each rank's GPU, of which `usable_bytes` can be used."""
    return MemoryPlan(
        weights.config,
        weights.vocab_size,
        Deployment(
            device_bytes=usable_bytes,
            tensor_parallel=num_ranks,
            memory_share=1.0,
            weight_format=Format.FP8 if keep_fp8 and weights.is_fp8 else Format.BF16,
            kv_format=Format.FP8 if fp8_kv else Format.BF16,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        ),
    )
