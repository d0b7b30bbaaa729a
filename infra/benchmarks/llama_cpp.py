"""The peer: llama.cpp's own benchmark programs and its server. See llama_cpp.md for how they are built."""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.benchmarks.sse_client import Dialect
from infra.local.child import Child, ChildSpec
from infra.local.health import http_ready
from infra.local.ports import choose_port

BATCHED_BENCH = "llama-batched-bench"
_PROGRAM_S = 600.0
_REPETITIONS = 3
# Its KV cache is shared out in equal parts: each sequence gets this many tokens, whatever it needs.
_SLOT_TOKENS = 1024

# The last event of a stream names the prompt and all sampling settings before its counts.
SERVER_DIALECT = Dialect(
    path="/completion",
    token=b'"stop":false',
    input_tokens=re.compile(rb'"tokens_evaluated":(\d+)'),
    output_tokens=re.compile(rb'"tokens_predicted":(\d+)'),
    last_bytes=64 * 1024,
)


class PeerError(RuntimeError):
    """A program of the peer failed, or printed what is not understood; the message says which and what."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Where the peer's programs are (None: not given, or not there), and how they are run."""

    weights: Path
    threads: int
    server: Path | None = None
    bench: Path | None = None
    batched_bench: Path | None = None

    @classmethod
    def at(cls, weights: Path, threads: int, server: Path | None, bench: Path | None) -> "LlamaCpp":
        """llama-batched-bench is looked for beside llama-bench. Raises PeerError for what is no program."""
        for path in (server, bench):
            if path is not None and not _is_program(path):
                raise PeerError(f"{path} is not a program that can be run")
        server, bench = (None if path is None else path.resolve() for path in (server, bench))
        batched_bench = None if bench is None else bench.with_name(BATCHED_BENCH)
        if batched_bench is not None and not _is_program(batched_bench):
            batched_bench = None
        return cls(weights.resolve(), threads, server, bench, batched_bench)

    async def prefill(self, num_tokens: int) -> float:
        """Prompt tokens per second by llama-bench: the best of three."""
        text = await self._run_bench("-p", str(num_tokens), "-n", "0", "-r", str(_REPETITIONS))
        return parse_bench(text, num_prompt=num_tokens, num_gen=0)

    async def decode_one(self, context: int, steps: int) -> float:
        """Generated tokens per second of one sequence by llama-bench, `context` tokens in the middle."""
        text = await self._run_bench(
            "-p", "0", "-n", str(steps), "-d", str(context - steps // 2), "-r", str(_REPETITIONS)
        )
        return parse_bench(text, num_prompt=0, num_gen=steps)

    async def decode(self, batch_sizes: Sequence[int], context: int, steps: int) -> dict[int, float]:
        """Generated tokens per second at each batch size by llama-batched-bench, `context` in the middle."""
        if self.batched_bench is None:
            raise PeerError(f"{BATCHED_BENCH} is not there")
        prompt = context - steps // 2
        text = await _output_of(
            self.batched_bench,
            *self._common(),
            *("-tb", str(self.threads)),
            *("-c", str(max(batch_sizes) * _SLOT_TOKENS)),
            *("-npp", str(prompt), "-ntg", str(steps)),
            *("-npl", ",".join(map(str, batch_sizes))),
            *("--output-format", "jsonl"),
        )
        return parse_batched_bench(text, batch_sizes, num_prompt=prompt, num_gen=steps)

    @asynccontextmanager
    async def serving(self, folder: Path, slots: int) -> AsyncIterator[str]:
        """Runs llama-server with `slots` parallel sequences and all its prompt caches off; yields its URL.

        Its log goes to `folder`. Raises infra.local.child.ChildError when it does not start.
        """
        if self.server is None:
            raise PeerError("llama-server is not there")
        port = choose_port(random.SystemRandom())
        argv = [
            str(self.server),
            *self._common(),
            *("-tb", str(self.threads)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("-np", str(slots), "-c", str(slots * _SLOT_TOKENS)),
            *("--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0"),
            *("--slot-prompt-similarity", "0"),
        ]
        child = Child(
            ChildSpec(
                "llama-server", argv, os.environ, folder / "llama-server.log", http_ready(port, "/health")
            )
        )
        await child.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await child.stop()

    async def _run_bench(self, *options: str) -> str:
        if self.bench is None:
            raise PeerError("llama-bench is not there")
        return await _output_of(self.bench, *self._common(), *options, "-o", "json")

    def _common(self) -> list[str]:
        return ["-m", str(self.weights), "-t", str(self.threads)]


def completion_body(prompt: str, max_tokens: int) -> dict[str, object]:
    """Greedy, to the last token, nothing cached."""
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }


def parse_bench(text: str, *, num_prompt: int, num_gen: int) -> float:
    """The best tokens per second of one test in the JSON output of llama-bench. Raises PeerError."""
    try:
        tests: list[dict[str, Any]] = json.loads(text)
        for test in tests:
            if (test["n_prompt"], test["n_gen"]) == (num_prompt, num_gen):
                return float(max(test["samples_ts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"llama-bench printed what is not understood ({error}): {text[:200]!r}") from error
    raise PeerError(f"llama-bench printed no test of {num_prompt} prompt and {num_gen} generated tokens")


def parse_batched_bench(
    text: str, batch_sizes: Sequence[int], *, num_prompt: int, num_gen: int
) -> dict[int, float]:
    """Generated tokens per second by batch size from JSON lines among other lines. Raises PeerError."""
    found: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
            if (row["pp"], row["tg"]) == (num_prompt, num_gen):
                found[row["pl"]] = float(row["speed_tg"])
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"{BATCHED_BENCH} printed what is not understood ({error}): {line!r}") from error
    if missing := sorted(set(batch_sizes) - set(found)):
        raise PeerError(f"{BATCHED_BENCH} printed no figures for batches of {missing}")
    return found


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


async def _output_of(program: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        str(program),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PROGRAM_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = "\n".join(err.decode(errors="replace").splitlines()[-5:])
        raise PeerError(f"{program.name} failed with status {process.returncode}: {last}")
    return out.decode(errors="replace")
