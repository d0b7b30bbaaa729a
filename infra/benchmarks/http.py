"""Throughput, latency and CPU over HTTP with the real model, at several numbers of parallel streams."""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

from infra.benchmarks.bench_stack import BenchStack, bench_stack
from infra.benchmarks.figures import cpu_seconds, percentile
from infra.benchmarks.sse_client import StreamTimes, stream
from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from schemas.catalog import SIMULATED_MODEL

_CONCURRENCY = (1, 8, 32)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runner", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--step-ms", type=float, default=5.75, help="of the simulated runner")
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="streams one after another at each place")
    parser.add_argument("--concurrency", type=int, nargs="+", default=_CONCURRENCY)


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    simulated = options.runner == "simulated"
    if not simulated:
        await asyncio.to_thread(ensure_model, DEFAULT_MODELS_DIR, report)
    model = SIMULATED_MODEL if simulated else MODEL_ID
    figures: dict[str, Any] = {}
    async with bench_stack(
        report,
        models_dir=DEFAULT_MODELS_DIR,
        models=(model,),
        runner=options.runner,
        step_ms=options.step_ms if simulated else None,
    ) as bench:
        body: dict[str, object] = {"model": model, "max_tokens": options.max_tokens, "ignore_eos": True}
        await _streams(bench, body, options, 2, 1, "warm-up")
        for concurrency in options.concurrency:
            report(f"c = {concurrency}")
            figures[f"c{concurrency}"] = await _measure(bench, body, options, concurrency)
    return {"runner": options.runner, "max_tokens": options.max_tokens, **figures}


async def _measure(
    bench: BenchStack, body: dict[str, object], options: argparse.Namespace, concurrency: int
) -> dict[str, Any]:
    sessions = bench.sessions()
    cpu_before, began = cpu_seconds(sessions), time.perf_counter()
    streams = await _streams(bench, body, options, concurrency, options.rounds, f"c{concurrency}")
    elapsed, cpu_after = time.perf_counter() - began, cpu_seconds(sessions)
    tokens = sum(times.output_tokens for times in streams)
    return {
        "tok_s": round(tokens / elapsed, 1),
        "ttft_ms_p50": round(percentile([times.ttft_ms for times in streams], 0.5), 1),
        "itl_ms_p50": round(percentile([gap for times in streams for gap in times.gaps_ms], 0.5), 2),
        "cpu_s_per_1000_tokens": {
            name: round((cpu_after[name] - cpu_before[name]) / tokens * 1000, 3) for name in sessions
        },
    }


async def _streams(
    bench: BenchStack,
    body: dict[str, object],
    options: argparse.Namespace,
    concurrency: int,
    rounds: int,
    label: str,
) -> list[StreamTimes]:
    async def one_after_another(place: int) -> list[StreamTimes]:
        times = []
        for round_number in range(rounds):
            # Distinct from the first word on, so that no cache of prefixes helps.
            prompt = " ".join([f"{label}-{place}-{round_number}", *["water"] * options.prompt_words])
            times.append(await stream(bench.stack.url(), bench.api_key, {**body, "prompt": prompt}))
        return times

    lists = await asyncio.gather(*(one_after_another(place) for place in range(concurrency)))
    return [times for some in lists for times in some]
