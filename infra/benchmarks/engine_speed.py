"""The engine of a worker alone, in a process of its own: scheduler, KV pool, model, greedy sampling.

Run as a program it reads one command a line, `prefill N` or `decode SEQUENCES CONTEXT STEPS`, and answers
each with a line of JSON. It ends with its input. Between commands it uses no processor.
"""

import argparse
import dataclasses
import json
import random
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.request import Request
from workers.runners import load_engine

_MAX_NUM_SEQS = 32
_MAX_MODEL_LEN = 1024
_REPETITIONS = 3
_FIRST_TEXT_TOKEN = 1000


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """`context` is the mean length of the sequences in the steps that were measured."""

    tok_s: float
    context: float


class EngineSpeedTest:
    """Prompts are random token ids, so no prefix is known."""

    def __init__(self, engine: Engine, vocab_size: int, rng: random.Random) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = rng

    def prefill(self, num_tokens: int) -> EngineSpeed:
        """One prompt from its arrival to its first token: the best of three."""
        best = 0.0
        for _ in range(_REPETITIONS):
            request = self._request(num_tokens, max_tokens=1)
            began = time.perf_counter()
            self._add(request)
            while self._engine.scheduler.has_requests:
                self._engine.step()
            best = max(best, num_tokens / (time.perf_counter() - began))
        return EngineSpeed(best, num_tokens / 2)

    def decode(self, num_seqs: int, context: int, steps: int) -> EngineSpeed:
        """`steps` steps, a token for each of `num_seqs` sequences in each; `context` tokens in the middle."""
        chunk = self._engine.scheduler.config.max_num_batched_tokens
        # While the last prompts are computed the first sequences go on already.
        ahead = num_seqs * context // chunk
        prompt_len = context - steps // 2 - ahead // 2
        requests = [self._request(prompt_len, max_tokens=2 * (steps + ahead + 2)) for _ in range(num_seqs)]
        for request in requests:
            self._add(request)
        while not all(request.output_token_ids for request in requests):
            self._engine.step()
        first = sum(request.num_tokens for request in requests)
        began = time.perf_counter()
        for _ in range(steps):
            self._engine.step()
        elapsed = time.perf_counter() - began
        last = sum(request.num_tokens for request in requests)
        if last - first != steps * num_seqs:
            raise RuntimeError(f"{steps} steps of {num_seqs} sequences gave {last - first} tokens")
        for request in requests:
            self._engine.abort(request.request_id, request.attempt)
        return EngineSpeed((last - first) / elapsed, (first + last) / 2 / num_seqs)

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        ids = [self._rng.randrange(_FIRST_TEXT_TOKEN, self._vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(secrets.token_bytes(16), 1, PriorityClass.INTERACTIVE, ids, sampling, 0)

    def _add(self, request: Request) -> None:
        if outputs := self._engine.add_request(request):
            raise RuntimeError(f"the engine refused a request: {outputs[0].error}")


def _run(test: EngineSpeedTest, command: str) -> EngineSpeed:
    match command.split():
        case ["prefill", num_tokens]:
            return test.prefill(int(num_tokens))
        case ["decode", num_seqs, context, steps]:
            return test.decode(int(num_seqs), int(context), int(steps))
    raise ValueError(f"not a command: {command!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models_dir", type=Path)
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    config = WorkerConfig(
        kafka="",
        models_dir=options.models_dir,
        model=options.model,
        threads=options.threads,
        prefix_caching="off",
        swap_memory_mib=0,
        inter_token_target_ms=0.0,
        max_num_seqs=_MAX_NUM_SEQS,
        max_model_len=_MAX_MODEL_LEN,
        canary_s=0.0,
    )
    loaded = load_engine(config)
    test = EngineSpeedTest(loaded.engine, loaded.vocab_size, random.Random(0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(_run(test, line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
