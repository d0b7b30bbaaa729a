"""What the pipeline adds to the bare engine: one stream at a time, simulated runner, interleaved.

A request crosses Kafka three times before its first token is out; `three_raw_hops_ms_p50` is what that alone
costs on this machine in the same run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.benchmarks.bare_engine import bare_engine
from infra.benchmarks.bench_stack import bench_stack
from infra.benchmarks.figures import percentile
from infra.benchmarks.hops import Hops, LogReader
from infra.benchmarks.raw_hop import raw_hop
from infra.benchmarks.sse_client import StreamTimes, stream
from schemas.catalog import SIMULATED_MODEL
from schemas.records import SamplingParams
from schemas.tokenization import Tokenizer
from workers.config import WorkerConfig

_WARM_UP = 10
_HOP_BYTES = 600


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100, help="measured requests on each side")
    parser.add_argument("--step-ms", type=float, default=5.75, help="time of an engine step, ms")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    prompt = "x" * (options.prompt_tokens - 1)
    body: dict[str, object] = {
        "model": SIMULATED_MODEL,
        "prompt": prompt,
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
    }
    ids = Tokenizer.simulated().encode_prompt(prompt)
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    engine_config = WorkerConfig(kafka="", runner="simulated", step_ms=options.step_ms)
    bare: list[StreamTimes] = []
    piped: list[StreamTimes] = []
    raw_hops: list[float] = []
    async with (
        bench_stack(
            report, models_dir=Path(), models=(SIMULATED_MODEL,), runner="simulated", step_ms=options.step_ms
        ) as bench,
        raw_hop(bench.stack.bootstrap_servers) as hop,
    ):
        log = LogReader(bench.stack.bootstrap_servers, bench.stack.config.layout)
        with bare_engine(engine_config) as engine:
            for number in range(_WARM_UP + options.requests):
                if number == _WARM_UP:
                    bare.clear()
                    piped.clear()
                    raw_hops.clear()
                    await log.mark()
                    report(f"measuring {options.requests} requests on each side")
                piped.append(await stream(bench.stack.url(), bench.api_key, body))
                bare.append(await engine.run(ids, sampling))
                raw_hops.append(await hop.measure(_HOP_BYTES))
        hops = await log.hops()
    for times in piped:
        if times.output_tokens != options.max_tokens:
            raise RuntimeError(f"a stream had {times.output_tokens} tokens instead of {options.max_tokens}")
    return {
        "requests": options.requests,
        "step_ms": options.step_ms,
        "events_per_token": round(
            sum(len(t.token_at) for t in piped) / (options.requests * options.max_tokens), 4
        ),
        **_compare(bare, piped),
        "three_raw_hops_ms_p50": round(3 * percentile(raw_hops, 0.5), 2),
        "hops_ms_mean": _mean_hops(piped, hops),
    }


def _compare(bare: list[StreamTimes], piped: list[StreamTimes]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        engine, pipeline = (percentile([t.ttft_ms for t in side], share) for side in (bare, piped))
        figures[f"engine_ttft_ms_{name}"] = round(engine, 2)
        figures[f"pipeline_ttft_ms_{name}"] = round(pipeline, 2)
        figures[f"added_ttft_ms_{name}"] = round(pipeline - engine, 2)
        engine, pipeline = (percentile([g for t in side for g in t.gaps_ms], share) for side in (bare, piped))
        figures[f"engine_itl_ms_{name}"] = round(engine, 2)
        figures[f"pipeline_itl_ms_{name}"] = round(pipeline, 2)
        figures[f"added_itl_ms_{name}"] = round(pipeline - engine, 2)
    return figures


def _mean_hops(piped: list[StreamTimes], hops: dict[str, Hops]) -> dict[str, float]:
    """Means over all requests. The broker truncates to whole ms, which the means correct by half of one."""
    sums = {
        "client_to_requests": 0.0,
        "requests_to_prefill": 0.0,
        "prefill_to_tokens": 0.0,
        "tokens_to_client": 0.0,
    }
    for times in piped:
        hop = hops[times.request_id]
        assert hop.requests is not None
        assert hop.prefill is not None
        assert hop.tokens is not None
        first_token = times.sent_at_epoch_ms + times.ttft_ms
        sums["client_to_requests"] += hop.requests + 0.5 - times.sent_at_epoch_ms
        sums["requests_to_prefill"] += hop.prefill - hop.requests
        sums["prefill_to_tokens"] += hop.tokens - hop.prefill
        sums["tokens_to_client"] += first_token - hop.tokens - 0.5
    return {name: round(total / len(piped), 2) for name, total in sums.items()}
