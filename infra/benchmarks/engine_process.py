"""Runs `engine_speed` beside the benchmark, with the environment that a worker gives its engine."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from infra.local.paths import PROJECT_ROOT
from workers.parent import CHILD_ENV

_LOAD_S = 120.0
_COMMAND_S = 300.0
_STOP_S = 10.0


class EngineProcess:
    """Asks the engine's process one thing at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def prefill(self, num_tokens: int) -> dict[str, Any]:
        """`EngineSpeed` of one prompt. Raises RuntimeError, TimeoutError."""
        return await self.ask(f"prefill {num_tokens}", _COMMAND_S)

    async def decode(self, num_seqs: int, context: int, steps: int) -> dict[str, Any]:
        """`EngineSpeed` of a running batch. Raises RuntimeError, TimeoutError."""
        return await self.ask(f"decode {num_seqs} {context} {steps}", _COMMAND_S)

    async def ask(self, command: str, timeout_s: float) -> dict[str, Any]:
        """The answer to a command, or with none the next line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            if command:
                self._process.stdin.write(command.encode() + b"\n")
                await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended at {command or 'its start'}: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def engine_process(models_dir: Path, model: str, threads: int) -> AsyncIterator[EngineProcess]:
    """An engine with the model loaded and warm."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "infra.benchmarks.engine_speed", str(models_dir), model, str(threads)),
        stdin=PIPE,
        stdout=PIPE,
        env=CHILD_ENV | os.environ,
        cwd=PROJECT_ROOT,
    )
    assert process.stdin is not None
    try:
        engine = EngineProcess(process)
        await engine.ask("", _LOAD_S)
        yield engine
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
