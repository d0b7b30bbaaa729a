"""KV from one process to another by the transfer engine: GB/s, by how many blocks a call takes."""

import asyncio
import os
from collections.abc import Callable
from random import Random
from typing import Any

from infra.benchmarks.transfer_process import TransferProcess
from infra.local.verbs import ensure_verbs
from schemas.kv_layout import KVLayout
from workers.handoff.write_lane import WriteLimits

# Of Llama 3.1 8B: a block of a layer's keys is 32 KiB. 2,000 tokens are 262 MB.
LAYOUT = KVLayout(16, "bfloat16", 1, 32, 8, 128)
NUM_TOKENS = 2000
NUM_BLOCKS = 160
_COPIES_A_CALL = (1, 4, 16, 64, 256)
_ROUNDS = 3


async def measure(report: Callable[[str], None]) -> dict[str, Any]:
    """Blocks lie scattered on both sides, as after hours of work, so a copy is one block of a layer's keys or
    values; and once in one piece. The bytes of each way are compared."""
    return await asyncio.to_thread(_measure, report)


def _measure(report: Callable[[str], None]) -> dict[str, Any]:
    env = ensure_verbs(os.environ, report)
    prefill = TransferProcess(LAYOUT, NUM_BLOCKS, env)
    decode = TransferProcess(LAYOUT, NUM_BLOCKS, env)
    try:
        num_blocks = -(-NUM_TOKENS // LAYOUT.block_size)
        random = Random(1)
        ours, theirs = (random.sample(range(NUM_BLOCKS), num_blocks) for _ in range(2))
        by_copies = {}
        default = WriteLimits()
        for copies in _COPIES_A_CALL:
            limits = WriteLimits(1 << 30, copies, default.settle_s)
            by_copies[str(copies)] = _fastest(prefill, decode, ours, theirs, limits)
            report(f"{copies} blocks a call: {by_copies[str(copies)]['gb_s']:.2f} GB/s")
        whole = list(range(num_blocks))
        scattered = _fastest(prefill, decode, ours, theirs, default)
        in_one_piece = _fastest(prefill, decode, whole, whole, default)
        report(f"as it is set: {scattered['gb_s']:.2f} GB/s, in one piece {in_one_piece['gb_s']:.2f}")
        return {
            "transfer_gb_s": scattered["gb_s"],
            "in_one_piece_gb_s": in_one_piece["gb_s"],
            "call_ms": scattered["call_ms"],
            "num_bytes": scattered["num_bytes"],
            "by_blocks_a_call": by_copies,
        }
    finally:
        prefill.close()
        decode.close()


def _fastest(
    prefill: TransferProcess, decode: TransferProcess, ours: list[int], theirs: list[int], limits: WriteLimits
) -> dict[str, Any]:
    sent = prefill.fill(ours, NUM_TOKENS, len(ours) + limits.max_call_copies)
    told = [prefill.write(decode, ours, theirs, NUM_TOKENS, limits) for _ in range(_ROUNDS)]
    error, found = decode.compare(theirs, NUM_TOKENS, told[-1]["checks"])
    error = error or next((each["error"] for each in told if each["error"]), "")
    if error or found != sent:
        raise RuntimeError(f"the transfer went wrong: {error or 'other bytes'}")
    best = min(told, key=lambda each: float(each["seconds"]))
    return {
        "gb_s": round(best["num_bytes"] / best["seconds"] / 1e9, 3),
        "call_ms": round(best["busy_s"] / best["num_calls"] * 1000, 3),
        "num_bytes": best["num_bytes"],
    }
