"""Which coordinator shards run here: those of the usage partitions held, once they have a tenant."""

import asyncio
import logging
from collections.abc import Callable

from schemas import topics
from schemas.priority import PriorityClass
from schemas.records import Tenant
from streams.ledger.coordinator import ShardCoordinator
from streams.ledger.results import FencedError

log = logging.getLogger(__name__)

_CHECK_S = 0.2
_FIRST_RESTART_S = 0.5
_MAX_RESTART_S = 10.0


class Shards:
    """`make(shard, tenants)` builds one; `tenants()` gives those of the shard that are served now."""

    def __init__(
        self,
        count: int,
        make: Callable[[int, Callable[[], dict[str, Tenant]]], ShardCoordinator],
    ) -> None:
        self._count, self._make = count, make
        self._tenants: dict[str, Tenant] = {}
        self._held: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def put_tenant(self, name: str, tenant: Tenant | None) -> None:
        """A record of control.tenants; None is a deletion. Raises ValueError for what is no tenant's name."""
        if not topics.TENANT_NAME.fullmatch(name):
            raise ValueError("key is no tenant's name")
        if tenant is None:
            self._tenants.pop(name, None)
        else:
            self._tenants[name] = tenant

    def hold(self, usage_partitions: set[int]) -> None:
        """The partitions of inference.usage that this process has now."""
        batch = PriorityClass.BATCH
        self._held = {topics.shard_of(p) for p in usage_partitions if topics.priority_of(p) is batch}

    def running(self) -> list[int]:
        """Those that have a coordinator here."""
        return sorted(self._tasks)

    def holds(self, shard: int) -> bool:
        return shard in self._held

    def tenants_of(self, shard: int) -> dict[str, Tenant]:
        """Not the disabled: their requests wait in their topic."""
        return {
            name: tenant
            for name, tenant in self._tenants.items()
            if not tenant.disabled and topics.tenant_shard(name, self._count) == shard
        }

    async def run(self) -> None:
        """Starts and stops shards as they come and go, until cancelled."""
        try:
            while True:
                for shard in [s for s in self._tasks if s not in self._held]:
                    await _cancel(self._tasks.pop(shard))
                    log.info("coordinator shard given up", extra={"shard": shard})
                for shard in [s for s, task in self._tasks.items() if task.done()]:
                    # By a cancel that nobody here asked for, which no `except Exception` sees.
                    log.error("coordinator shard ended by itself", extra={"shard": shard})
                    del self._tasks[shard]
                for shard in self._held - self._tasks.keys():
                    if self.tenants_of(shard):
                        self._tasks[shard] = asyncio.create_task(self._keep(shard), name=f"shard-{shard}")
                await asyncio.sleep(_CHECK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, shard: int) -> None:
        wait_s = _FIRST_RESTART_S
        while True:
            coordinator = self._make(shard, lambda: self.tenants_of(shard))
            began = asyncio.get_running_loop().time()
            try:
                await coordinator.run()
            except FencedError as e:
                # By whom is to have it. If that is us after all, the assignment will still say so then.
                log.warning("coordinator shard lost", extra={"shard": shard, "reason": str(e)})
                wait_s = _MAX_RESTART_S
            except Exception as e:
                if asyncio.get_running_loop().time() - began > _MAX_RESTART_S:
                    wait_s = _FIRST_RESTART_S
                log.error(
                    "coordinator shard begins anew", extra={"shard": shard, "wait_s": wait_s}, exc_info=e
                )
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _MAX_RESTART_S)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
