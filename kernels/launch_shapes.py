"""The launches that the models of the catalogue make, over tensors without memory: what to compile ahead."""

import torch
from torch import Tensor

from kernels import (
    fp8_matmul,
    gated_activation,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    top_k_top_p_sampling,
)
from kernels.launch import FP8, Launch

BLOCK_SIZE = 16
_NUM_BLOCKS = 4096
_MAX_BLOCKS = 512  # of a sequence
_PROCESSORS = 132
_FP8_BLOCK = 128  # inputs that share a scale, as DeepSeek's and Qwen's checkpoints have them
# (query heads, KV heads, head dim, sliding window) of a GPU. Qwen 2.5 0.5B, Llama 3.1 8B and 70B in eight
# parts, Gemma 3 270M's local layers and 4B's global ones.
ATTENTION = {
    "qwen-0.5b": (14, 2, 64, None),
    "llama-8b": (32, 8, 128, None),
    "llama-70b-tp8": (8, 1, 128, None),
    "gemma-270m": (4, 1, 256, 512),
    "gemma-4b": (8, 4, 256, None),
}
FP8_KV = {"llama-8b", "llama-70b-tp8"}


def attention_launches(name: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, Launch]:
    """Of the shape in ATTENTION: prefill with decodes, many decodes, and a few decodes of long sequences."""
    num_heads, num_kv_heads, head_dim, window = ATTENTION[name]
    cache = _empty(_NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, dtype=cache_dtype)
    found = {}
    for case, num_tokens, num_seqs in (("mixed", 2048, 64), ("decode", 256, 256), ("long-decode", 4, 4)):
        query = _empty(num_tokens, num_heads, head_dim, dtype=dtype)
        launches = paged_attention.launches(
            query,
            query,
            cache,
            cache,
            _empty(num_seqs, _MAX_BLOCKS, dtype=torch.int32),
            _empty(num_seqs, dtype=torch.int32),
            _empty(num_seqs + 1, dtype=torch.int32),
            head_dim**-0.5,
            window,
            1.0,
            1.0,
            _PROCESSORS,
        )
        for launch in launches:
            found[f"{launch.name}.{name}.{case}.{_name(dtype)}.kv-{_name(cache_dtype)}"] = launch
    return found


def layer_launches(dtype: torch.dtype) -> dict[str, Launch]:
    """What lies between the matrices of Llama 8B, and sampling from the largest vocabulary (Gemma 3)."""
    num_tokens, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size = (
        64,
        4096,
        32,
        8,
        128,
        14336,
    )
    hidden = _empty(num_tokens, hidden_size, dtype=dtype)
    weight = _empty(hidden_size, dtype=torch.float32)
    query = _empty(num_tokens, num_heads, head_dim, dtype=dtype)
    key = _empty(num_tokens, num_kv_heads, head_dim, dtype=dtype)
    slots = _empty(num_tokens, dtype=torch.int64)
    gate_up = _empty(num_tokens, 2 * intermediate_size, dtype=dtype)
    product = _empty(num_tokens, intermediate_size, dtype=dtype)
    floats = _empty(num_tokens, dtype=torch.float64)
    found = {
        "rms_norm": rms_norm.launch(hidden, hidden, None, weight, 1e-6),
        "fused_add_rms_norm": rms_norm.launch(hidden, hidden, hidden, weight, 1e-6),
        "rotary_embedding": rotary_embedding.launch(
            query, query, _empty(num_tokens, 2, head_dim // 2, dtype=torch.float32)
        ),
        "silu_and_mul": gated_activation.launch(product, gate_up, gelu=False),
        "gelu_and_mul": gated_activation.launch(product, gate_up, gelu=True),
        "sample_rows": top_k_top_p_sampling.launch(
            slots, _empty(num_tokens, 262_144, dtype=torch.float32), floats, slots, floats, floats, floats
        ),
    }
    for cache_dtype in (dtype, FP8):
        cache = _empty(_NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, dtype=cache_dtype)
        found[f"reshape_and_cache.kv-{_name(cache_dtype)}"] = reshape_and_cache.launch(
            key, key, cache, cache, slots, 1.0, 1.0
        )
    for form, block in (("rows", hidden_size), ("blocks", _FP8_BLOCK)):
        for num_rows in (8, 64, 2048):
            x = _empty(num_rows, hidden_size, dtype=dtype)
            found[f"fp8_matmul.{form}-{num_rows}"] = fp8_matmul.launch(
                _empty(num_rows, intermediate_size, dtype=dtype),
                x,
                _empty(intermediate_size, hidden_size, dtype=FP8),
                _empty(intermediate_size, hidden_size // block, dtype=torch.float32),
                block,
            )
    return {f"{name}.{_name(dtype)}": launch for name, launch in found.items()}


def all_launches(dtype: torch.dtype = torch.bfloat16) -> dict[str, Launch]:
    """Every one by a name that says what it is."""
    found = layer_launches(dtype)
    for name in ATTENTION:
        found |= attention_launches(name, dtype, dtype)
        if name in FP8_KV:
            found |= attention_launches(name, dtype, FP8)
    return found


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}[dtype]
