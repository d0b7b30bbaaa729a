"""The admission process of a simulated fleet: the shipped decisions, fed as the service feeds them."""

from collections.abc import Iterable

from infra.simulator.scenario import Scenario, TenantPlan, admission_config
from schemas import topics
from schemas.priority import PriorityClass
from schemas.records import (
    ClassLimits,
    Decision,
    Heartbeat,
    InferenceRequest,
    Join,
    Left,
    Tenant,
    Usage,
)
from streams.admission.actions import Action, Assign
from streams.admission.arrival import OverloadPolicy
from streams.admission.router import RoutingPolicy

_SHARDS = 4
_NONCE = bytes(8)
# Virtual time 0, in ms of the epoch.
_EPOCH_MS = 1_000_000_000


def milliseconds(now: float) -> int:
    """A virtual time in seconds as services tell it."""
    return _EPOCH_MS + int(now * 1000)


class AdmissionDriver:
    """One process that holds all partitions. Times in seconds of the virtual clock."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        log_decisions: bool,
        overload: OverloadPolicy | None = None,
        routing: RoutingPolicy | None = None,
    ) -> None:
        config = admission_config(scenario.policy | {"decision_log": log_decisions})
        self.admission = config.admission(overload=overload, routing=routing)
        start = milliseconds(0.0)
        self.admission.on_assigned(dict.fromkeys(range(_SHARDS * topics.NUM_CLASSES), 0), start)
        self._partitions = {
            name: [topics.tenant_partition(name, priority, _SHARDS) for priority in PriorityClass]
            for name in scenario.tenants
        }
        for name, plan in scenario.tenants.items():
            self.admission.on_tenant(name, _tenant(name, plan), start)
        self._offset = 0
        self._num_events = 0
        self._epoch = self._join("admission", 0)
        self.admission.fleet.watch_as("admission", 0, self._epoch)
        # What it says of its partitions is for other processes.
        self._own_heartbeat = Heartbeat("admission", 0, self._epoch, _NONCE)

    def start_worker(self, slot: int) -> int:
        """A run joins; returns its epoch."""
        return self._join("worker", slot)

    def on_request(self, request: InferenceRequest, now: float) -> list[Action]:
        partition = self._partitions[request.tenant][request.priority]
        self._offset += 1
        offset = self._offset
        self.admission.takeover.accept(partition, offset)
        return self.admission.on_request(request, b"", partition, offset, None, milliseconds(now))

    def on_dispatched(self, assign: Assign, offset: int) -> list[Action]:
        return self.admission.on_dispatched(assign, offset)

    def on_usage(self, rows: Iterable[Usage], now: float) -> list[Action]:
        at = milliseconds(now)
        return [action for row in rows for action in self.admission.on_usage(row, at)]

    def on_heartbeats(self, heartbeats: Iterable[Heartbeat], sent_at: float, now: float) -> list[Action]:
        """A batch of fleet.heartbeats that the broker took at `sent_at`, this process's own, and a tick."""
        admission, timestamp = self.admission, milliseconds(sent_at)
        for heartbeat in (*heartbeats, self._own_heartbeat):
            admission.fleet.on_heartbeat(heartbeat, timestamp)
        at = milliseconds(now)
        return [*admission.tick(at), *admission.fleet_changed(at)]

    def on_left(self, slot: int, epoch: int, now: float) -> list[Action]:
        self._num_events += 1
        self.admission.fleet.on_event(Left("worker", slot, epoch, "died"), self._num_events)
        return self.admission.fleet_changed(milliseconds(now))

    def is_gone(self, slot: int, epoch: int) -> bool:
        """Whether whoever reads the heartbeats takes this run for lost."""
        return self.admission.fleet.gone("worker", slot, epoch) is not None

    def num_queued(self) -> tuple[int, ...]:
        """Requests that wait, by class."""
        return tuple(self.admission.num_queued(priority) for priority in PriorityClass)

    def decisions(self) -> list[Decision]:
        """Those since the last call."""
        return self.admission.decisions.drain()

    def _join(self, role: str, slot: int) -> int:
        self._num_events += 1
        self.admission.fleet.on_event(Join(role, slot, _NONCE), self._num_events)
        return self._num_events


def _tenant(name: str, plan: TenantPlan) -> Tenant:
    limits = [ClassLimits(priority, **plan.limits) for priority in PriorityClass] if plan.limits else []
    return Tenant(name, PriorityClass.parse(plan.tier), [], limits, plan.weight)
