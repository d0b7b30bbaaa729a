"""Which implementation of an operation a device has: Triton's kernels on CUDA, plain torch elsewhere.

Triton is imported where there is a CUDA device and not before: to import `kernels` must never need one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.paged_attention_ref import paged_attention_ref
from kernels.reshape_and_cache_ref import reshape_and_cache_ref
from kernels.rms_norm_ref import fused_add_rms_norm_ref, rms_norm_ref
from kernels.rotary_embedding_ref import rotary_embedding_ref
from kernels.sampling_ref import sample_rows_ref
from kernels.silu_and_mul_ref import silu_and_mul_ref


@dataclass(frozen=True, slots=True)
class Operations:
    """What a model and its sampler are built from; arguments as the functions named `…_ref` say."""

    paged_attention: Callable[..., Tensor]
    reshape_and_cache: Callable[..., None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    sample_rows: Callable[..., Tensor]


PLAIN = Operations(
    paged_attention=paged_attention_ref,
    reshape_and_cache=reshape_and_cache_ref,
    rms_norm=rms_norm_ref,
    fused_add_rms_norm=fused_add_rms_norm_ref,
    rotary_embedding=rotary_embedding_ref,
    silu_and_mul=silu_and_mul_ref,
    gelu_and_mul=gelu_and_mul_ref,
    sample_rows=sample_rows_ref,
)
"""The references: they say what is right, on every device, and are the deterministic mode."""


def operations(device: torch.device) -> Operations:
    """For tensors on this device."""
    return _triton() if device.type == "cuda" else PLAIN


def best_device() -> torch.device:
    """The CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for an FP8 cache on a GPU whose hardware does not convert it."""
    if device.type != "cuda" or dtype is not torch.float8_e4m3fn:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"an FP8 KV cache needs compute capability 8.9; {name} has {'.'.join(map(str, capability))}"
        )


def _triton() -> Operations:
    from kernels.gated_activation import gelu_and_mul, silu_and_mul
    from kernels.paged_attention import paged_attention
    from kernels.reshape_and_cache import reshape_and_cache
    from kernels.rms_norm import fused_add_rms_norm, rms_norm
    from kernels.rotary_embedding import rotary_embedding
    from kernels.top_k_top_p_sampling import sample_rows

    return Operations(
        paged_attention=paged_attention,
        reshape_and_cache=reshape_and_cache,
        rms_norm=rms_norm,
        fused_add_rms_norm=fused_add_rms_norm,
        rotary_embedding=rotary_embedding,
        silu_and_mul=silu_and_mul,
        gelu_and_mul=gelu_and_mul,
        sample_rows=sample_rows,
    )
