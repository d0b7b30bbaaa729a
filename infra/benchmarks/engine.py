"""The engine with the real model beside llama.cpp: same weights and threads, in turns, best of all rounds.

Alone: `prefill_512`, and `b1`, `b8`, `b32` sequences at a context of 256 tokens. Ours is the engine without
Kafka, greedy sampling included; theirs llama-bench and llama-batched-bench, which do not sample. Over HTTP,
`http_8x481_…`: eight streams of 481 distinct tokens in and 32 out, through the whole pipeline and through
llama-server; prefix caches are off on both sides, and so is our inter-token target, which the peer has not.
`vs_llamacpp` is ours divided by theirs: of tokens per second, where more is better, and for `…_ttft` of the
median time to the first token, where less is better.

`foreign_cpu_share` is what other processes had of the machine's processors while a figure was measured. How
the peer is built: infra/benchmarks/llama_cpp.md. Without it, our side is measured alone.
"""

import argparse
import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.benchmarks.engine_process import EngineProcess, engine_process
from infra.benchmarks.llama_cpp import BATCHED_BENCH, LlamaCpp
from infra.benchmarks.long_prompts import LongPrompts, measure_headrace, measure_llama_server
from infra.benchmarks.machine import cpu_times, wait_for_calm
from infra.benchmarks.scheduler import scheduler_cost
from infra.benchmarks.side_by_side import Figures, compare
from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from schemas.catalog import Catalog
from schemas.tokenization import Tokenizer

_PREFILL_TOKENS = 512
_CONTEXT = 256
_STEPS = 32
_BATCH_SIZES = (1, 8, 32)
# Threads that wait for one another at each barrier, as both sides' do, lose far more than others take.
_DOUBTFUL_SHARE = 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="the peer's server")
    parser.add_argument(
        "--llama-bench",
        type=Path,
        metavar="PATH",
        help=f"the peer's benchmark; {BATCHED_BENCH} lies beside it",
    )
    parser.add_argument("--threads", type=int, default=2, help="of each side's engine")
    parser.add_argument(
        "--rounds", type=int, default=3, help="ours, theirs, ours, theirs ...; the best counts"
    )
    parser.add_argument(
        "--calm-s", type=float, default=60.0, help="seconds to wait for an idle machine, each time"
    )
    parser.add_argument("--no-http", action="store_true", help="leave the HTTP part out")


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    await asyncio.to_thread(ensure_model, DEFAULT_MODELS_DIR, report)
    catalog = Catalog.load(DEFAULT_MODELS_DIR)
    weights = catalog.weights_path(catalog.get(MODEL_ID))
    peer = LlamaCpp.at(weights, options.threads, options.llama_server, options.llama_bench)
    notes = _notes(peer)
    for note in notes:
        report(note)
    bench = _EngineBenchmark(options, peer, report)
    async with engine_process(DEFAULT_MODELS_DIR, MODEL_ID, options.threads) as engine:
        for number in range(options.rounds):
            report(f"engine alone, round {number + 1} of {options.rounds}")
            await bench.engine_round(engine)
    if not options.no_http:
        prompts = LongPrompts(Tokenizer.load(catalog, MODEL_ID), random.Random(0))
        with TemporaryDirectory(prefix="headrace-bench-") as folder:
            for number in range(options.rounds):
                report(f"over HTTP, round {number + 1} of {options.rounds}")
                await bench.http_round(prompts, Path(folder))
    busiest = max([*bench.ours.foreign_shares().values(), *bench.theirs.foreign_shares().values()])
    if busiest > _DOUBTFUL_SHARE:
        notes.append(f"others used up to {busiest:.0%} of the processors even in best rounds: do not compare")
        report(notes[-1])
    await wait_for_calm(options.calm_s, report)
    cost = await asyncio.to_thread(scheduler_cost)
    return {
        "threads": options.threads,
        "context": _CONTEXT,
        "rounds": options.rounds,
        "notes": notes,
        "vs_llamacpp": compare(bench.ours, bench.theirs),
        "headrace": bench.ours.best(),
        "llamacpp": bench.theirs.best(),
        "foreign_cpu_share": {
            "headrace": bench.ours.foreign_shares(),
            "llamacpp": bench.theirs.foreign_shares(),
        },
        "scheduler": {
            "us_per_step": round(cost.us_per_step, 1),
            "us_per_sequence": round(cost.us_per_sequence, 2),
        },
    }


def _notes(peer: LlamaCpp) -> list[str]:
    """What is not compared, and why."""
    notes = []
    if peer.bench is None:
        notes.append("no --llama-bench: the engine is measured on our side alone")
    elif peer.batched_bench is None:
        notes.append(f"no {BATCHED_BENCH} beside llama-bench: batches are measured on our side alone")
    if peer.server is None:
        notes.append("no --llama-server: HTTP is measured on our side alone")
    return notes


class _EngineBenchmark:
    """Takes turns: what is measured on one side is measured on the other right after it."""

    def __init__(self, options: argparse.Namespace, peer: LlamaCpp, report: Callable[[str], None]) -> None:
        self.ours = Figures()
        self.theirs = Figures()
        self._options = options
        self._peer = peer
        self._report = report

    async def engine_round(self, engine: EngineProcess) -> None:
        async def prefill() -> dict[str, float]:
            return {"prefill_512": (await engine.prefill(_PREFILL_TOKENS))["tok_s"]}

        async def peer_prefill() -> dict[str, float]:
            return {"prefill_512": await self._peer.prefill(_PREFILL_TOKENS)}

        async def decode() -> dict[str, float]:
            speeds = [await engine.decode(size, _CONTEXT, _STEPS) for size in _BATCH_SIZES]
            return {f"b{size}": speed["tok_s"] for size, speed in zip(_BATCH_SIZES, speeds, strict=True)}

        async def peer_decode() -> dict[str, float]:
            speeds = await self._peer.decode(_BATCH_SIZES, _CONTEXT, _STEPS)
            return {f"b{size}": speed for size, speed in speeds.items()}

        async def peer_decode_one() -> dict[str, float]:
            return {"b1": await self._peer.decode_one(_CONTEXT, _STEPS)}

        await self._measure(self.ours, prefill)
        if self._peer.bench is not None:
            await self._measure(self.theirs, peer_prefill)
        await self._measure(self.ours, decode)
        if self._peer.batched_bench is not None:
            await self._measure(self.theirs, peer_decode)
        if self._peer.bench is not None:
            await self._measure(self.theirs, peer_decode_one)

    async def http_round(self, prompts: LongPrompts, folder: Path) -> None:
        async def pipeline() -> dict[str, float]:
            figures = await measure_headrace(
                DEFAULT_MODELS_DIR, MODEL_ID, self._options.threads, prompts, lambda message: None
            )
            return _http_keys(dataclasses.asdict(figures))

        async def llama_server() -> dict[str, float]:
            return _http_keys(dataclasses.asdict(await measure_llama_server(self._peer, prompts, folder)))

        await self._measure(self.ours, pipeline)
        if self._peer.server is not None:
            await self._measure(self.theirs, llama_server)

    async def _measure(self, figures: Figures, measure: Callable[[], Awaitable[dict[str, float]]]) -> None:
        await wait_for_calm(self._options.calm_s, self._report)
        before = cpu_times()
        values = await measure()
        share = cpu_times().foreign_share_since(before)
        figures.add(values, share)
        self._report(
            ", ".join(f"{key} {value:.1f}" for key, value in values.items()) + f" (foreign {share:.0%})"
        )


def _http_keys(figures: dict[str, float]) -> dict[str, float]:
    return {"http_8x481_tok_s": figures["tok_s"], "http_8x481_ttft": figures["ttft_ms"]}
