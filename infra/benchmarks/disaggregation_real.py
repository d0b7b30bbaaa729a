"""The part of `disaggregation` with the real model: see there."""

import asyncio
import os
import random
import urllib.request
from collections.abc import Callable
from statistics import median
from typing import Any

from infra.benchmarks.bench_stack import BenchStack, bench_stack
from infra.benchmarks.handoff_client import HandoffClient, Served, handoff_client
from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from infra.local.verbs import ensure_verbs

PROMPT_TOKENS = (256, 1_000)
OUTPUT_TOKENS = 16
_ROUNDS = 5
_PREFILL, _DECODE = 0, 1
_LIBRARY_PATH = "LD_LIBRARY_PATH"
# Of the vocabulary: no control or byte tokens.
_IDS = range(1_000, 100_000)
_VISIBLE = "headrace_transfer_visible_seconds"


async def measure(report: Callable[[str], None]) -> dict[str, Any]:
    """Each prompt is a new one. By turns it runs whole at one worker, and goes from there to the other: the
    same process computes both prompts, so what differs is the handoff."""
    await asyncio.to_thread(ensure_model, DEFAULT_MODELS_DIR, report)
    env = await asyncio.to_thread(ensure_verbs, os.environ, report)
    worker = {
        "HEADRACE_THREADS": "1",
        "HEADRACE_PREFIX_CACHING": "off",
        "HEADRACE_SWAP_MEMORY_MIB": "0",
        "HEADRACE_CANARY_S": "0",
    }
    if _LIBRARY_PATH in env:
        worker[_LIBRARY_PATH] = env[_LIBRARY_PATH]
    async with (
        bench_stack(
            report,
            models_dir=DEFAULT_MODELS_DIR,
            models=(MODEL_ID,),
            workers=2,
            gateways=0,
            admissions=0,
            ledgers=0,
            settings={
                "worker": worker,
                f"worker-{_PREFILL}": {"HEADRACE_WORKER_ROLE": "prefill"},
                f"worker-{_DECODE}": {"HEADRACE_WORKER_ROLE": "decode"},
            },
        ) as bench,
        handoff_client(bench.stack.bootstrap_servers, MODEL_ID) as client,
    ):
        await client.hear((_PREFILL, _DECODE))
        return await _measure(bench, client, report)


async def _measure(bench: BenchStack, client: HandoffClient, report: Callable[[str], None]) -> dict[str, Any]:
    rng = random.Random(1)
    by_length = {}
    await client.serve(rng.choices(_IDS, k=300), 4, _PREFILL, _DECODE)
    await client.serve(rng.choices(_IDS, k=300), 4, _DECODE)
    for length in PROMPT_TOKENS:
        before = await _figures(bench)
        whole: list[Served] = []
        handed: list[Served] = []
        for _ in range(_ROUNDS):
            whole.append(await client.serve(rng.choices(_IDS, k=length), OUTPUT_TOKENS, _PREFILL))
            prompt = rng.choices(_IDS, k=length)
            handed.append(await client.serve(prompt, OUTPUT_TOKENS, _PREFILL, _DECODE))
        after = await _figures(bench)
        sent = {name: after[name] - before.get(name, 0.0) for name in after}
        if sent[f"{_VISIBLE}_count"] != _ROUNDS or any(each.slot != _DECODE for each in handed):
            raise RuntimeError(f"not all were handed over: {sent}")
        num_bytes, busy_s = sent["headrace_kv_sent_bytes_total"], sent["headrace_kv_write_seconds_total"]
        by_length[str(length)] = figures = {
            "ttft_ms_unified": round(median(each.ttft_ms for each in whole), 1),
            "ttft_ms_disaggregated": round(median(each.ttft_ms for each in handed), 1),
            "transfer_visible_ms": round(1000 * sent[f"{_VISIBLE}_sum"] / _ROUNDS, 2),
            "kv_mb": round(num_bytes / _ROUNDS / 1e6, 2),
            "transfer_gb_s": round(num_bytes / busy_s / 1e9, 3),
            "call_ms": round(1000 * busy_s / sent["headrace_kv_writes_total"], 2),
        }
        report(f"prompts of {length} tokens: {figures}")
    longest = by_length[str(PROMPT_TOKENS[-1])]
    return {
        "real": {
            "model": MODEL_ID,
            "transfer_gb_s": longest["transfer_gb_s"],
            "transfer_visible_ms": longest["transfer_visible_ms"],
            "by_prompt_tokens": by_length,
        }
    }


async def _figures(bench: BenchStack) -> dict[str, float]:
    """What prefill's /metrics say of KV that it sent."""
    url = bench.stack.url(f"worker-{_PREFILL}") + "/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=5) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(("headrace_kv_", _VISIBLE)))
    return {name: float(value) for name, value in pairs if "{" not in name}
