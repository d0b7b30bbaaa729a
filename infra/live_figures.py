"""One line of live figures of a running stack, from the /metrics of its gateway and workers."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from infra.local.stack import Stack

INTERVAL_S = 1.0
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Totals and levels over all workers. `kv_usage` is a share of 1, the fullest worker's."""

    running: float
    waiting: float
    finished: float
    prompt_tokens: float
    generation_tokens: float
    kv_usage: float

    @classmethod
    def of(cls, pages: list[str]) -> "Figures":
        """From the Prometheus pages of all workers."""
        sums: dict[str, float] = defaultdict(float)
        kv_usage = 0.0
        for page in pages:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    sums[sample.name] += sample.value
                    if sample.name == "vllm:kv_cache_usage_perc":
                        kv_usage = max(kv_usage, sample.value)
        return cls(
            running=sums["vllm:num_requests_running"],
            waiting=sums["vllm:num_requests_waiting"],
            finished=sums["vllm:request_success_total"],
            prompt_tokens=sums["vllm:prompt_tokens_total"],
            generation_tokens=sums["vllm:generation_tokens_total"],
            kv_usage=kv_usage,
        )

    def line(self, tokens_per_s: float) -> str:
        return (
            f"{self.finished:,.0f} requests done, {self.running:.0f} running, {self.waiting:.0f} waiting · "
            f"{self.prompt_tokens:,.0f} tokens in, {self.generation_tokens:,.0f} out, "
            f"{tokens_per_s:,.0f}/s · KV {100 * self.kv_usage:.0f} %"
        )


async def follow(stack: Stack, console: Console) -> None:
    """Rewrites the line every second until it is cancelled; says it once where no terminal is."""
    urls = [f"{stack.url(f'worker-{slot}')}/metrics" for slot in range(stack.config.workers)]
    last, last_at = 0.0, time.monotonic()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        while True:
            try:
                pages = await asyncio.gather(*(client.get(url) for url in urls))
            except httpx.HTTPError:
                await asyncio.sleep(INTERVAL_S)
                continue
            figures, now = Figures.of([page.text for page in pages]), time.monotonic()
            rate = (figures.generation_tokens - last) / max(now - last_at, 1e-9) if last else 0.0
            last, last_at = figures.generation_tokens, now
            if not console.is_terminal:
                console.print(figures.line(rate), soft_wrap=True)
                await asyncio.Event().wait()
            console.print(f"\r\x1b[2K{figures.line(rate)}"[: console.width + 5], end="", soft_wrap=True)
            await asyncio.sleep(INTERVAL_S)
