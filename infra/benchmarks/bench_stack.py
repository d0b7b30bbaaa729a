"""A stack of its own for a benchmark, with a tenant; gone when the benchmark ends."""

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.local.services import StackConfig
from infra.local.stack import BROKER, Stack
from infra.tenants import create_tenant
from schemas.priority import PriorityClass

_TENANT = "bench"


@dataclass(frozen=True, slots=True)
class BenchStack:
    stack: Stack
    api_key: str

    def sessions(self) -> dict[str, int]:
        """Session id of each process of the stack, by its name."""
        config = self.stack.config
        names = [BROKER, "ledger-0"]
        for service, count in (
            ("admission", config.admissions),
            ("worker", config.workers),
            ("gateway", config.gateways),
        ):
            names += [f"{service}-{slot}" for slot in range(count)]
        return {name: self.stack.child(name).pid for name in names}


@asynccontextmanager
async def bench_stack(report: Callable[[str], None], **config: Any) -> AsyncIterator[BenchStack]:
    """Starts a StackConfig with `config` on free ports and fresh data."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        stack = Stack(StackConfig(data_dir=Path(folder), **config), report=report)
        async with stack:
            api_key = await create_tenant(
                stack.bootstrap_servers, stack.config.layout, _TENANT, PriorityClass.INTERACTIVE, []
            )
            yield BenchStack(stack, api_key)
