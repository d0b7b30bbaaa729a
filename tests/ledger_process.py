"""Runs the ledger as the process it is in production."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import httpx

from infra.local.ports import claim_port
from schemas.topics import Layout

READY_S = 90.0


class LedgerProcess:
    """`python -m streams ledger` with a data folder, on the simulated model."""

    def __init__(
        self, bootstrap: str, layout: Layout, data_dir: Path, slot: int = 0, **settings: str
    ) -> None:

        rng = random.Random()
        self.data_dir = data_dir
        self.http_port = claim_port(0, "ledger", rng)
        self.sql_port = claim_port(0, "ledger SQL", rng, {self.http_port})
        self.log_file = data_dir.parent / f"ledger-{slot}.log"
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
            "HEADRACE_KAFKA": bootstrap,
            "HEADRACE_SLOT": str(slot),
            "HEADRACE_HTTP_PORT": str(self.http_port),
            "HEADRACE_SQL_PORT": str(self.sql_port),
            "HEADRACE_SHARDS": str(layout.shards),
            "HEADRACE_WORKER_SLOTS": str(layout.worker_slots),
            "HEADRACE_GATEWAY_SLOTS": str(layout.gateway_slots),
            "HEADRACE_MODELS_DIR": str(data_dir / "no-models"),
            "HEADRACE_MODELS": "simulated",
            "HEADRACE_DATA_DIR": str(data_dir),
            **settings,
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, wait: bool = True) -> None:
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "streams", "ledger", env=self._environment, stdout=log, stderr=log
            )
        if wait:
            await self.ready()

    async def ready(self) -> None:
        """Raises TimeoutError, or RuntimeError with the log's end when the process died."""
        text = ""
        try:
            async with asyncio.timeout(READY_S):
                while (text := await self.readiness()) != "ok\n":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"not ready: {text!r}\n{self.log_end()}") from None

    async def readiness(self) -> str:
        assert self.process is not None
        if self.process.returncode is not None:
            raise RuntimeError(f"ledger ended with {self.process.returncode}\n{self.log_end()}")
        try:
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{self.http_port}/health/ready")
        except httpx.TransportError:
            return "no answer"
        return answer.text

    async def sql(self, query: str, **params: str) -> str:
        async with httpx.AsyncClient() as client:
            answer = await client.get(
                f"http://127.0.0.1:{self.sql_port}/", params={"query": query, **params}, timeout=20
            )
        return answer.text

    async def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 20)

    def log_end(self) -> str:
        return self.log_file.read_text(errors="replace")[-4000:]

    def __repr__(self) -> str:
        return f"LedgerProcess(log={self.log_file})"
