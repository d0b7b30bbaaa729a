"""What becomes of requests that wait: a worker that has room, more waiting, or an end of it."""

from dataclasses import dataclass

from streams.admission.actions import Action, Assign, admitted, assign
from streams.admission.backlog import Backlog
from streams.admission.decisions import DecisionLog
from streams.admission.fair_queue import QueuedRequest
from streams.admission.memory import RequestMemory
from streams.admission.model_queue import ModelQueue
from streams.admission.overload import Overload
from streams.admission.pairing import Route
from streams.admission.refusing import Refusing
from streams.admission.router import Router
from streams.admission.tenants import Tenants
from streams.admission.waiting import WaitingPolicy, expired, no_worker, over_allowance, over_bounds


@dataclass(frozen=True, slots=True)
class Placement:
    policy: WaitingPolicy
    decisions: DecisionLog
    tenants: Tenants
    router: Router
    overload: Overload
    backlog: Backlog
    memory: RequestMemory
    refusing: Refusing

    def run_all(self, now: int) -> list[Action]:
        """Dispatches what there is room for, of all models."""
        return [action for model in self.backlog.models() for action in self.run(model, now)]

    def run(self, model: str, now: int) -> list[Action]:
        """Dispatches what there is room for, in order; what no worker can ever run is refused."""
        return [
            self.refusing.evict(item, no_worker(model, self.policy.no_worker_wait_ms), now)
            if route is None
            else self._assign(item, route, now)
            for item, route in self.backlog.take(model, self.overload.level(model))
        ]

    def wait(self, queue: ModelQueue, item: QueuedRequest, now: int) -> Action:
        """Lets the request wait, unless too much waits already."""
        request = item.request
        fair = queue.classes[request.priority]
        allowance = self.tenants.max_enqueued_tokens(request.tenant, request.priority)
        retry_after_ms = self.overload.retry_after_ms(request.model)
        waiting = self.backlog.tenant_tokens(request.tenant, request.priority)
        refusal = over_allowance(waiting, allowance, retry_after_ms)
        refusal = refusal or over_bounds(self.policy, fair, item, retry_after_ms)
        if refusal is not None and request.attempt == 1:
            return self.refusing.evict(item, refusal, now)
        self.backlog.watch(item)
        return admitted(item)

    def overdue(self, now: int) -> list[Action]:
        """Ends what has waited as long as it may."""
        evict, wait_ms = self.refusing.evict, self.policy.no_worker_wait_ms
        late: list[Action] = []
        for item in self.backlog.expired(now):
            self.overload.waited(item, now - item.queued_at)
            late.append(evict(item, expired(self.overload.retry_after_ms(item.request.model)), now))
        unserved = self.backlog.without_worker(now, wait_ms)
        return late + [evict(item, no_worker(item.request.model, wait_ms), now) for item in unserved]

    def _assign(self, item: QueuedRequest, route: Route, now: int) -> Assign:
        request = item.request
        candidates = self.decisions.candidates(item, route, self.router)
        expected, until = item.expected_output_tokens, now + self.policy.handoff.lease_ms
        entry = self.router.dispatch_along(route, request, expected, item.prefix, until)
        waited = max(0, now - item.queued_at)
        prefill = self.overload.dispatched(item, route, waited)
        self.memory.assigned(item, route, entry, now, prefill)
        self.decisions.dispatched(item, route, entry, waited, prefill, candidates)
        return assign(item, route, entry, waited, self.policy.handoff)
