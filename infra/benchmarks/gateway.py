"""The whole pipeline on one machine with an engine that costs nothing: how many tokens a second, whose CPU.

Two stacks, one after the other: `saturated`, with the simulated runner without delay, and `paced`, with a
step every 5.75 ms. Streams are asked for as chat completions by a raw-protocol client, which counts events
that hold text. For each number of parallel streams, in the same run: throughput, TTFT and the CPU of each
process. At one stream the bare engine runs the same requests in turn: what the pipeline adds to it is
`added_ttft_ms_p50`.

A gateway's cost is a line: so much a request, so much a token. Both follow from its CPU time in runs with few
and with many output tokens (`--tokens`), at `--slope-at` streams: `gateway_us_per_token` is the slope,
`gateway_ms_per_request` the rest. `stub_us_per_token` is the slope of a server that writes the same events
with nothing behind it, one write an event: what HTTP alone costs here.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.benchmarks.bare_engine import bare_engine
from infra.benchmarks.bench_stack import BenchStack, bench_stack
from infra.benchmarks.figures import cpu_seconds, percentile
from infra.benchmarks.machine import cpu_times, wait_for_calm
from infra.benchmarks.sse_client import CHAT, StreamTimes, stream
from infra.benchmarks.sse_stub import sse_stub
from schemas.catalog import SIMULATED_MODEL, simulated_model
from schemas.chat_template import ChatTemplate
from schemas.records import SamplingParams
from schemas.tokenization import Tokenizer
from workers.config import WorkerConfig

_GATEWAY = "gateway-0"
_TEMPLATE_TOKENS = len(
    ChatTemplate(simulated_model().chat_template or "", Tokenizer.simulated()).encode(
        [{"role": "user", "content": ""}]
    )
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 16, 64, 128))
    parser.add_argument("--slope-at", type=int, default=64, help="parallel streams for the gateway's cost")
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 512), help="output tokens, few and many")
    parser.add_argument("--seconds", type=float, default=6.0, help="new streams are begun for so long")
    parser.add_argument("--step-ms", type=float, default=5.75, help="of the paced engine")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds to wait for others to be quiet")
    parser.add_argument("--only", choices=("saturated", "paced"))


@dataclass(frozen=True, slots=True)
class _Measured:
    streams: list[StreamTimes]
    elapsed_s: float
    cpu_s: dict[str, float]
    foreign_share: float

    @property
    def tokens(self) -> int:
        return sum(times.output_tokens for times in self.streams)

    def figures(self) -> dict[str, Any]:
        ttft = [times.ttft_ms for times in self.streams]
        gaps = [gap for times in self.streams for gap in times.gaps_ms]
        return {
            "tok_s": round(self.tokens / self.elapsed_s),
            "ttft_ms_p50": round(percentile(ttft, 0.5), 2),
            "ttft_ms_p99": round(percentile(ttft, 0.99), 2),
            "itl_ms_p50": round(percentile(gaps, 0.5), 2),
            "itl_ms_p99": round(percentile(gaps, 0.99), 2),
            "requests": len(self.streams),
            "events_per_token": round(sum(len(t.token_at) for t in self.streams) / self.tokens, 4),
            "cpu_share": {name: round(used / self.elapsed_s, 3) for name, used in self.cpu_s.items()},
            "foreign_cpu_share": round(self.foreign_share, 3),
        }


async def run(options: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    figures: dict[str, Any] = {"prompt_tokens": options.prompt_tokens, "max_tokens": options.tokens[0]}
    if options.only != "paced":
        figures["saturated"] = await _pipeline(options, 0.0, report)
    if options.only != "saturated":
        figures["paced"] = await _pipeline(options, options.step_ms, report)
    figures["stub_us_per_token"] = await _stub(options, report)
    return figures


async def _pipeline(
    options: argparse.Namespace, step_ms: float, report: Callable[[str], None]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    few, many = options.tokens
    async with bench_stack(
        report, models_dir=Path(), models=(SIMULATED_MODEL,), runner="simulated", step_ms=step_ms
    ) as bench:
        load = _Load(options, bench, bench.stack.url(), bench.sessions(), report)
        await load.run(options.slope_at, few, f"warm-up, a step every {step_ms:g} ms")
        for concurrency in options.concurrency:
            figures[f"c{concurrency}"] = (await load.run(concurrency, few, f"c = {concurrency}")).figures()
        if 1 in options.concurrency:
            figures["c1"]["added_ttft_ms_p50"] = await _added_ttft(options, bench, step_ms)
        figures |= await load.line("gateway", _GATEWAY, options.slope_at, few, many)
    return figures


async def _stub(options: argparse.Namespace, report: Callable[[str], None]) -> float:
    few, many = options.tokens
    async with sse_stub() as (url, pid):
        load = _Load(options, None, url, {"stub": pid}, report)
        return (await load.line("stub", "stub", options.slope_at, few, many))["stub_us_per_token"]


class _Load:
    """Streams for `options.seconds` at so many places, each begun when the one before it has ended."""

    def __init__(
        self,
        options: argparse.Namespace,
        bench: BenchStack | None,
        url: str,
        sessions: dict[str, int],
        report: Callable[[str], None],
    ) -> None:
        self._options = options
        self._api_key = "" if bench is None else bench.api_key
        self._url = url
        self._sessions = sessions
        self._report = report
        self._count = 0

    async def line(self, label: str, name: str, concurrency: int, few: int, many: int) -> dict[str, float]:
        """What process `name` costs a token and a request, from runs with `few` and `many` tokens."""
        cost: list[float] = []
        for tokens in (few, many):
            measured = await self.run(concurrency, tokens, f"{label}, {tokens} tokens a stream")
            cost.append(measured.cpu_s[name] / len(measured.streams))
        slope = (cost[1] - cost[0]) / (many - few)
        return {
            f"{label}_us_per_token": round(slope * 1e6, 2),
            f"{label}_ms_per_request": round((cost[0] - few * slope) * 1e3, 3),
        }

    async def run(self, concurrency: int, max_tokens: int, what: str) -> _Measured:
        await wait_for_calm(self._options.calm, self._report)
        self._report(what)
        machine, cpu, began = cpu_times(), cpu_seconds(self._sessions), time.perf_counter()
        end = began + self._options.seconds
        own = time.process_time()
        lists = await asyncio.gather(*(self._place(end, max_tokens) for _ in range(concurrency)))
        elapsed = time.perf_counter() - began
        used = {name: after - cpu[name] for name, after in cpu_seconds(self._sessions).items()}
        used["client"] = time.process_time() - own
        streams = [times for some in lists for times in some]
        for times in streams:
            if times.output_tokens != max_tokens:
                raise RuntimeError(f"a stream had {times.output_tokens} tokens instead of {max_tokens}")
        return _Measured(streams, elapsed, used, cpu_times().foreign_share_since(machine))

    async def _place(self, end: float, max_tokens: int) -> list[StreamTimes]:
        streams: list[StreamTimes] = []
        while not streams or time.perf_counter() < end:
            self._count += 1
            body = _body(self._count, self._options.prompt_tokens, max_tokens)
            streams.append(await stream(self._url, self._api_key, body, CHAT))
        return streams


def _body(number: int, prompt_tokens: int, max_tokens: int) -> dict[str, object]:
    # Distinct from the first token on, so that no cache of prefixes helps.
    text = f"{number:08d}".ljust(prompt_tokens - _TEMPLATE_TOKENS, "x")
    return {
        "model": SIMULATED_MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


async def _added_ttft(options: argparse.Namespace, bench: BenchStack, step_ms: float) -> float:
    few = options.tokens[0]
    sampling = SamplingParams(max_tokens=few, ignore_eos=True)
    piped: list[float] = []
    bare: list[float] = []
    with bare_engine(WorkerConfig(kafka="", runner="simulated", step_ms=step_ms)) as engine:
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            body = _body(len(bare), options.prompt_tokens, few)
            piped.append((await stream(bench.stack.url(), bench.api_key, body, CHAT)).ttft_ms)
            bare.append((await engine.run([1] * options.prompt_tokens, sampling)).ttft_ms)
    return round(percentile(piped, 0.5) - percentile(bare, 0.5), 2)
