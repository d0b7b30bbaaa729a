"""A service as a process of its own, on a broker of the test's."""

import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.local.ports import claim_port
from schemas.topics import Layout

DEADLINE_S = 90.0
ROOT = Path(__file__).parent.parent


class ServiceProcess:
    """`python -m <module>`, told what every service is told and `settings`."""

    def __init__(
        self,
        module: Sequence[str],
        name: str,
        bootstrap: str,
        layout: Layout,
        slot: int,
        log_dir: Path,
        settings: Mapping[str, str],
    ) -> None:
        self.slot = slot
        self.bootstrap = bootstrap
        self.port = claim_port(0, name, random.Random())
        self.log_file = log_dir / f"{name}-{slot}-{self.port}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        env |= {
            "HEADRACE_KAFKA": bootstrap,
            "HEADRACE_SLOT": str(slot),
            "HEADRACE_HTTP_PORT": str(self.port),
            "HEADRACE_SHARDS": str(layout.shards),
            "HEADRACE_WORKER_SLOTS": str(layout.worker_slots),
            "HEADRACE_GATEWAY_SLOTS": str(layout.gateway_slots),
            **settings,
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *module], env=env, cwd=ROOT, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.get("/health/ready")[0] != 200:
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < deadline, self.log_file.read_text()
            time.sleep(0.02)

    def get(self, path: str) -> tuple[int, str]:
        """(status, body); status 0 when nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
