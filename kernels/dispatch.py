"""Which implementation of an operation a device has: Triton's kernels on CUDA, plain torch elsewhere.

Triton is imported where there is a CUDA device and not before: to import `kernels` must never need one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_matmul_ref import fp8_matmul_ref
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
    fp8_matmul: Callable[[Tensor, Tensor, Tensor, int], Tensor]


PLAIN = Operations(
    paged_attention=paged_attention_ref,
    reshape_and_cache=reshape_and_cache_ref,
    rms_norm=rms_norm_ref,
    fused_add_rms_norm=fused_add_rms_norm_ref,
    rotary_embedding=rotary_embedding_ref,
    silu_and_mul=silu_and_mul_ref,
    gelu_and_mul=gelu_and_mul_ref,
    sample_rows=sample_rows_ref,
    fp8_matmul=fp8_matmul_ref,
)
"""The references: they say what is right, on every device, and are the deterministic mode."""


def operations(device: torch.device) -> Operations:
    """For tensors on this device."""
    return triton_operations() if device.type == "cuda" else PLAIN


def best_device() -> torch.device:
    """The CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fp8(device: torch.device) -> bool:
    """Whether its hardware converts FP8; what computes without hardware always does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def check_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for an FP8 cache on a GPU whose hardware does not convert it."""
    if dtype is torch.float8_e4m3fn and not has_fp8(device):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"an FP8 KV cache needs compute capability 8.9; {name} has {capability}")


def triton_operations() -> Operations:
    """Triton's, for GPUs or, where TRITON_INTERPRET=1 was set before, for its interpreter on CPU tensors."""
    from kernels.fp8_matmul import fp8_matmul
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
        fp8_matmul=fp8_matmul,
    )
