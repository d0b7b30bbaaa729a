"""Paged attention on this machine's GPU: decodes against its memory's speed, prefill against tensor cores.

Shares are of the datasheet's figures for the device. Without an NVIDIA GPU it says so and measures nothing.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import check_cache_dtype, operations
from kernels.launch_shapes import ATTENTION, BLOCK_SIZE
from workers.roofline import DEVICES, Device

_WARMUP_MS, _MEASURE_MS = 50, 300


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(ATTENTION), default="llama-8b")
    parser.add_argument("--kv", choices=["bf16", "fp8"], default="bf16", help="dtype of the cache")
    parser.add_argument("--num-seqs", type=int, default=64, help="decodes at once")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of each sequence")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    if not torch.cuda.is_available():
        report("no NVIDIA GPU here: nothing was measured")
        return {"device": None}
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    datasheet = datasheet_of(name)
    if datasheet is None:
        report(f"{name} is not among {', '.join(DEVICES)}: figures are without shares of its peak")
    cache_dtype = torch.bfloat16 if options.kv == "bf16" else torch.float8_e4m3fn
    check_cache_dtype(cache_dtype, device)
    cases = {"decode": [1] * options.num_seqs, "prefill": [options.seq_len]}
    figures: dict[str, Any] = {"device": name, "shape": options.shape, "kv": options.kv}
    for case, query_lens in cases.items():
        seconds = _seconds(options.shape, query_lens, options.seq_len, cache_dtype, device)
        figures[case] = attention_figures(
            options.shape, query_lens, options.seq_len, cache_dtype.itemsize, seconds, datasheet
        )
        report(f"{case}: {figures[case]}")
    return figures


def datasheet_of(name: str) -> Device | None:
    """By the name that the driver gives, such as "NVIDIA H100 80GB HBM3"."""
    return next((device for key, device in DEVICES.items() if key.upper() in name.upper().split()), None)


def attention_figures(
    shape: str,
    query_lens: list[int],
    seq_len: int,
    cache_bytes: int,
    seconds: float,
    datasheet: Device | None,
) -> dict[str, float]:
    """Of one launch over sequences of `seq_len`, whose last `query_lens` tokens are new.

    Counts what has to be done: keys and values read once for each sequence, two multiply-adds for each pair
    of query and visible key. cache_bytes: of one value.
    """
    num_heads, num_kv_heads, head_dim, window = ATTENTION[shape]
    pairs = keys = 0
    for query_len in query_lens:
        visible = [
            min(position + 1, window or position + 1) for position in range(seq_len - query_len, seq_len)
        ]
        pairs += sum(visible)
        keys += min(seq_len, visible[0] + query_len - 1)
    moved = 2 * keys * num_kv_heads * head_dim * cache_bytes
    operations = 4 * pairs * num_heads * head_dim
    figures = {
        "us": seconds * 1e6,
        "gb_per_s": moved / seconds / 1e9,
        "tflops": operations / seconds / 1e12,
    }
    if datasheet is not None:
        figures["hbm_share"] = moved / seconds / datasheet.hbm_bytes_per_s
        figures["tensor_core_share"] = operations / seconds / datasheet.bf16_flops
    return figures


def _seconds(
    shape: str, query_lens: list[int], seq_len: int, cache_dtype: torch.dtype, device: torch.device
) -> float:
    """Median of one launch, with the L2 cache emptied before each."""
    from triton.testing import do_bench

    num_heads, num_kv_heads, head_dim, window = ATTENTION[shape]
    num_seqs = len(query_lens)
    blocks = -(-seq_len // BLOCK_SIZE)

    def cache() -> Tensor:
        pool = (num_seqs * blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        return torch.randn(pool, dtype=torch.bfloat16, device=device).to(cache_dtype)

    keys, values = cache(), cache()
    # Blocks of a sequence lie where they were free, not beside each other.
    order = torch.randperm(num_seqs * blocks, device=device)
    tables = order.view(num_seqs, blocks).int()
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    query = torch.randn(sum(query_lens), num_heads, head_dim, dtype=torch.bfloat16, device=device)
    attend = operations(device).paged_attention
    milliseconds: float = do_bench(
        lambda: attend(query, keys, values, tables, lens, starts, head_dim**-0.5, window),
        warmup=_WARMUP_MS,
        rep=_MEASURE_MS,
        return_mode="median",
    )
    return milliseconds / 1e3
