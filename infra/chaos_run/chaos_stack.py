"""The stack that chaos is done to: everything twice, ways to hurt it, and tenants for the load."""

import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from infra.chaos_run.black_hole import BlackHole
from infra.chaos_run.failpoints import ARMED
from infra.chaos_run.small_disk import small_disk
from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from infra.local.ports import choose_port
from infra.local.services import SERVICES, Service, StackConfig
from infra.local.stack import Stack
from infra.tenants import create_tenant
from schemas.catalog import SIMULATED_MODEL
from schemas.handoff_records import WorkerRole
from schemas.priority import PriorityClass
from schemas.topics import Layout

GATEWAYS, ADMISSIONS, LEDGERS, WORKERS = 2, 2, 2, 3
TENANTS = {
    "interactive": PriorityClass.INTERACTIVE,
    "free": PriorityClass.FREE,
    "batch": PriorityClass.INTERACTIVE,
}
_SMALL_DISK_MIB = 64
# Each of these reaches the broker through a proxy of its own.
PROXIED = ("worker-2", "gateway-1", "admission-1")
# With roles, in the place of WORKERS unified ones. One pool is gone whenever its only worker is.
ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)


@dataclass(frozen=True, slots=True)
class ChaosStack:
    """`keys`: by tenant's name. `armed`: the folder of failpoints. `holes`: by process. `small_disk`: what
    files are on, where a tmpfs could be mounted for them."""

    stack: Stack
    model: str
    keys: dict[str, str]
    armed: Path
    holes: dict[str, BlackHole]
    small_disk: Path | None

    @property
    def processes(self) -> list[str]:
        """All but the broker."""
        config = self.stack.config
        counts = {
            "gateway": config.gateways,
            "admission": config.admissions,
            "ledger": config.ledgers,
            "worker": config.workers,
        }
        return [f"{name}-{slot}" for name, count in counts.items() for slot in range(count)]

    def named(self, who: str) -> list[str]:
        """The processes of a service, or the workers of a role."""
        config = self.stack.config
        if who in (WorkerRole.PREFILL, WorkerRole.DECODE):
            return [f"worker-{slot}" for slot in range(config.workers) if config.role_of(slot) == who]
        return [name for name in self.processes if name.startswith(who)]

    def gateway_urls(self) -> list[str]:
        return [self.stack.url(f"gateway-{slot}") for slot in range(self.stack.config.gateways)]


@asynccontextmanager
async def chaos_stack(
    report: Callable[[str], None],
    *,
    deterministic_model: bool,
    step_ms: float,
    brokers: int = 1,
    disaggregated: bool = False,
) -> AsyncIterator[ChaosStack]:
    """On free ports and fresh data. With `deterministic_model` two workers serve the real model, slowly;
    `disaggregated` is for the simulated one, whose workers then have ROLES."""
    if deterministic_model:
        ensure_model(DEFAULT_MODELS_DIR, report)
    # Not the run's seed: two runs with one seed may go on side by side.
    rng = random.Random()
    taken: set[int] = set()
    proxied = PROXIED if brokers == 1 else ()  # the others would have to have proxies too
    if disaggregated:
        proxied = ("worker-0", *proxied)
    for _ in range(2 * len(proxied)):
        taken.add(choose_port(rng, taken))
    ports = sorted(taken)
    proxies = dict(zip(ports[::2], ports[1::2], strict=True))
    holes = {name: BlackHole(proxy, own) for name, (own, proxy) in zip(proxied, proxies.items(), strict=True)}
    async with AsyncExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="headrace-chaos-")))
        armed = folder / "armed"
        armed.mkdir()
        disk = running.enter_context(small_disk(folder / "objects", _SMALL_DISK_MIB))
        every = {ARMED: str(armed)}
        settings = {
            # Clients that hear nothing for two seconds go to the other gateway.
            "gateway": {**every, "HEADRACE_KEEP_ALIVE_S": "0.5", "HEADRACE_SUCCESSION_S": "6"},
            "admission": every,
            "ledger": every,
            "worker": {**every, "HEADRACE_CANARY_S": "1"},
        }
        for name, hole in holes.items():
            settings[name] = {"HEADRACE_KAFKA": f"127.0.0.1:{hole.port}"}
            await running.enter_async_context(hole.running())
        config = StackConfig(
            data_dir=folder,
            models_dir=DEFAULT_MODELS_DIR if deterministic_model else folder,
            models=(MODEL_ID if deterministic_model else SIMULATED_MODEL,),
            runner="torch" if deterministic_model else "simulated",
            deterministic=deterministic_model,
            step_ms=None if deterministic_model else step_ms,
            workers=2 if deterministic_model else WORKERS,
            roles=ROLES if disaggregated else (),
            gateways=GATEWAYS,
            admissions=ADMISSIONS,
            ledgers=LEDGERS,
            layout=Layout() if brokers == 1 else Layout(replication=3, min_isr=2),
            kafka_proxies=proxies,
            brokers=brokers,
            settings=settings,
        )
        stack = Stack(config, report=report, services=_with_failpoints(), rng=rng)
        await running.enter_async_context(stack)
        keys = {
            name: await create_tenant(stack.bootstrap_servers, config.layout, name, tier)
            for name, tier in TENANTS.items()
        }
        yield ChaosStack(stack, config.models[0], keys, armed, holes, disk)


def _with_failpoints() -> dict[str, Service]:
    return {
        name: replace(service, argv=(sys.executable, "-m", "infra.chaos_run.failpoints", name))
        for name, service in SERVICES.items()
    }
