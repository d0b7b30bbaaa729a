"""Eight long prompts at once over HTTP, each another text: a server must compute them all."""

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.benchmarks.bench_stack import bench_stack
from infra.benchmarks.figures import percentile
from infra.benchmarks.llama_cpp import SERVER_DIALECT, LlamaCpp, completion_body
from infra.benchmarks.sse_client import NATIVE, Dialect, StreamTimes, stream
from schemas.tokenization import Tokenizer

NUM_STREAMS = 8
INPUT_TOKENS = 481
OUTPUT_TOKENS = 32
_WORD = re.compile(rb" [a-z]{4,}")
_TRIES = 20


@dataclass(frozen=True, slots=True)
class LongPromptFigures:
    """`tok_s`: output tokens of all streams per second, from the first request to the last token."""

    tok_s: float
    ttft_ms: float


class LongPrompts:
    """Makes texts of exactly INPUT_TOKENS tokens (with the model's bos), no two with a common beginning."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._words = [piece.decode() for piece in tokenizer.token_bytes if _WORD.fullmatch(piece)]
        if not self._words:
            raise ValueError("the vocabulary holds no whole words")

    def take(self, count: int) -> list[str]:
        """Raises RuntimeError when the tokenizer joins or splits words too often."""
        texts: list[str] = []
        for _ in range(count * _TRIES):
            text = "".join(self._rng.choices(self._words, k=INPUT_TOKENS - 1))
            begins = {other[:16] for other in texts}
            if len(self._tokenizer.encode_prompt(text)) == INPUT_TOKENS and text[:16] not in begins:
                texts.append(text)
                if len(texts) == count:
                    return texts
        raise RuntimeError(f"no {count} texts of {INPUT_TOKENS} tokens in {count * _TRIES} tries")


async def measure_headrace(
    models_dir: Path, model: str, threads: int, prompts: LongPrompts, report: Callable[[str], None]
) -> LongPromptFigures:
    """The whole pipeline, on a stack of its own: client, gateway, Kafka, admission, worker and back."""
    settings = {
        "HEADRACE_THREADS": str(threads),
        "HEADRACE_PREFIX_CACHING": "off",
        # The peer does not hold its batch to an inter-token time.
        "HEADRACE_INTER_TOKEN_TARGET_MS": "0",
    }
    async with bench_stack(
        report, models_dir=models_dir, models=(model,), settings={"worker": settings}
    ) as bench:
        return await _measure(
            bench.stack.url(),
            bench.api_key,
            NATIVE,
            lambda prompt: {
                "model": model,
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "temperature": 0.0,
            },
            prompts,
        )


async def measure_llama_server(peer: LlamaCpp, prompts: LongPrompts, folder: Path) -> LongPromptFigures:
    """llama-server with a slot for each stream and its caches off; its log goes to `folder`."""
    async with peer.serving(folder, NUM_STREAMS) as url:
        return await _measure(
            url, "", SERVER_DIALECT, lambda prompt: completion_body(prompt, OUTPUT_TOKENS), prompts
        )


async def _measure(
    url: str,
    api_key: str,
    dialect: Dialect,
    body: Callable[[str], dict[str, object]],
    prompts: LongPrompts,
) -> LongPromptFigures:
    # The first streams of a new process pay for what it loads then.
    for prompt in prompts.take(2):
        await stream(url, api_key, body(prompt), dialect)
    bodies = [body(prompt) for prompt in prompts.take(NUM_STREAMS)]
    began = time.perf_counter()
    streams = await asyncio.gather(*(stream(url, api_key, each, dialect) for each in bodies))
    return summarize(streams, began)


def summarize(streams: list[StreamTimes], began: float) -> LongPromptFigures:
    """Raises RuntimeError when a stream had other numbers of tokens than asked for."""
    for times in streams:
        if (times.input_tokens, times.output_tokens) != (INPUT_TOKENS, OUTPUT_TOKENS):
            raise RuntimeError(
                f"a stream had {times.input_tokens} tokens in and {times.output_tokens} out instead of "
                f"{INPUT_TOKENS} and {OUTPUT_TOKENS}"
            )
    elapsed = max(times.token_at[-1] for times in streams) - began
    return LongPromptFigures(
        tok_s=len(streams) * OUTPUT_TOKENS / elapsed,
        ttft_ms=percentile([times.ttft_ms for times in streams], 0.5),
    )
