"""Attention over a paged KV cache on GPUs (Kwon et al. 2023), prefill chunks and decodes in one launch.

Softmax is computed online over tiles of keys (Dao 2023, FlashAttention-2), the query heads of a KV head
together. Where there are fewer programs than the GPU has processors, the keys of a sequence are split among
several (Flash-Decoding), and a second kernel joins their parts: so the last bits depend on the batch, which
the deterministic mode must not use.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import FP8, Launch, cdiv, check_rows, next_power_of_2
from kernels.paged_attention_kernel import join_parts_kernel, paged_attention_kernel
from kernels.tuned import Case, tuned_constants

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16
# Fewer keys than this for a program would be all overhead; more splits than that cost more to join.
_MIN_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut. `block_m`: rows (query tokens times heads of the group); `tile`: keys at once."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def tiling(head_dim: int, group_size: int, element_size: int, *, decode: bool) -> Tiling:
    """For queries of `element_size` bytes; decode: every sequence has one new token.

    Where `tuned` has none for a device. Not measured: chosen from the report of `headrace kernels aot`, so
    that nothing spills and shared memory suffices from compute capability 8.0 on.
    """
    group = max(_MIN_DOT_ROWS, next_power_of_2(group_size))
    wide = head_dim > 128
    if element_size > 2:  # fp32 multiplies without tensor cores, from registers
        return Tiling(group, 16 if wide else 32, 4, 1)
    if decode:
        return Tiling(group, 32 if wide else 64, 4, 2)
    # With 4 warps heads of 128 spill on sm_80.
    return Tiling(max(group, 64), 32 if wide else 64, 8 if head_dim > 64 else 4, 2)


def tuning_case(head_dim: int, group_size: int, element_size: int, *, decode: bool) -> Case:
    """What tilings are measured by."""
    return {
        "head_dim": head_dim,
        "group_size": group_size,
        "element_size": element_size,
        "decode": decode,
    }


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_processors: int | None = None,
) -> Tensor:
    """As `paged_attention_ref`, on the GPU and without waiting for it.

    int32 for block_tables, seq_lens, query_start_loc. A sequence of length 0 (padding of a CUDA graph) gets
    zeros. The caches may be FP8 (e4m3) with one scale each; num_processors: None asks the device.
    Raises ValueError naming what does not fit.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for launch in launches(
        output,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        scale,
        sliding_window,
        k_scale,
        v_scale,
        _num_processors(query.device) if num_processors is None else num_processors,
    ):
        launch.run()
    return output


def launches(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int | None,
    k_scale: float,
    v_scale: float,
    num_processors: int,
    cut: Tiling | None = None,
) -> list[Launch]:
    """What `paged_attention` runs: the attention, and where keys are split what joins the parts. `cut`: None
    is the tiling that was measured on the query's device, or the default."""
    _check(query, key_cache, value_cache, block_tables)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = len(seq_lens)
    block_size, num_kv_heads = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    decode = num_tokens == num_seqs
    if cut is None:
        cut = _tiling_on(query.device, head_dim, group_size, query.element_size(), decode=decode)
    block_q = cut.block_m // group_size
    # Each sequence's last block of queries may be part full.
    num_query_blocks = num_seqs if decode else num_tokens // block_q + num_seqs
    max_keys = block_tables.shape[1] * block_size
    if sliding_window is not None:
        max_keys = min(max_keys, sliding_window + block_q)
    num_splits = _num_splits(num_query_blocks * num_kv_heads, max_keys, num_processors) if decode else 1
    head_dim_padded = next_power_of_2(head_dim)
    parts = lse = None
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    attention = Launch(
        paged_attention_kernel,
        (num_query_blocks, num_kv_heads, num_splits),
        {
            "output": output,
            "parts": parts,
            "lse": lse,
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "query_start_loc": query_start_loc,
            "num_seqs": num_seqs,
            "query_stride": query.stride(0),
            "table_stride": block_tables.stride(0),
            # exp2 is what the hardware has; an FP8 key's scale is a factor of its score.
            "scale_log2": scale * k_scale * _LOG2_E,
            "v_scale": v_scale,
        },
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP_SIZE": group_size,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": head_dim_padded,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": cut.block_m,
            "BLOCK_Q": block_q,
            "TILE": cut.tile,
            "WINDOW": sliding_window or 0,
            "NUM_SPLITS": num_splits,
            "DECODE": decode,
        },
        cut.num_warps,
        cut.num_stages,
    )
    if parts is None:
        return [attention]
    join = Launch(
        join_parts_kernel,
        (num_tokens, num_heads),
        {"output": output, "parts": parts, "lse": lse},
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": head_dim_padded,
            "NUM_SPLITS": num_splits,
        },
        num_stages=1,
    )
    return [attention, join]


def _tiling_on(
    device: torch.device, head_dim: int, group_size: int, element_size: int, *, decode: bool
) -> Tiling:
    case = tuning_case(head_dim, group_size, element_size, decode=decode)
    if constants := tuned_constants(device, "paged_attention", case):
        return Tiling(**constants)
    return tiling(head_dim, group_size, element_size, decode=decode)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if head_dim != key_cache.shape[3] or num_heads % num_kv_heads:
        raise ValueError(
            f"query has {num_heads} heads of {head_dim}, the cache {num_kv_heads} of {key_cache.shape[3]}: "
            "heads must be a multiple, of the same size"
        )
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("key_cache and value_cache must have the same shape and dtype")
    if key_cache.dtype not in (query.dtype, FP8):
        raise ValueError(f"key_cache must be {query.dtype}, as query is, or {FP8}; it is {key_cache.dtype}")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache must be contiguous")
    if query.stride(1) != head_dim or block_tables.stride(1) != 1:
        raise ValueError("heads of query and rows of block_tables must be contiguous")
    check_rows("query", query)


def _num_splits(num_programs: int, max_keys: int, num_processors: int) -> int:
    """A power of two: enough to give every processor two programs, none with too few keys."""
    wanted = min(cdiv(2 * num_processors, max(num_programs, 1)), max_keys // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 if wanted < 2 else 1 << int(math.log2(wanted))


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
