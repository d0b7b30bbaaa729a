"""What it takes to say no: nothing stays reserved or remembered, and the decision has its record."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.records import InferenceRequest
from streams.admission.actions import Reply, reject, reply_to
from streams.admission.backlog import Backlog
from streams.admission.decisions import DecisionLog
from streams.admission.fair_queue import QueuedRequest
from streams.admission.idempotency import IdempotencyKeys
from streams.admission.limits import Limits
from streams.admission.memory import RequestMemory
from streams.admission.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Refusing:
    limits: Limits
    keys: IdempotencyKeys
    decisions: DecisionLog
    backlog: Backlog
    memory: RequestMemory

    def refuse(
        self,
        request: InferenceRequest,
        refusal: Refusal,
        traceparent: str | None,
        now: int | None = None,
        inputs: Mapping[str, float] | None = None,
    ) -> Reply:
        """Does not let a request in. `now` None: nothing is said of what its tenant has left."""
        self.decisions.refused(request, refusal, inputs or {})
        return self._reject(request, refusal, traceparent, now)

    def evict(self, item: QueuedRequest, refusal: Refusal, now: int) -> Reply:
        """Takes a waiting request out of its queue and refuses it."""
        request = item.request
        self.backlog.cancel(item)
        self.memory.forget(request.request_id, request.attempt)
        if request.attempt == 1:
            self.limits.release(request.request_id, now)
        self.decisions.evicted(item, refusal, max(0, now - item.queued_at))
        return self._reject(request, refusal, item.traceparent, now)

    def _reject(
        self, request: InferenceRequest, refusal: Refusal, traceparent: str | None, now: int | None
    ) -> Reply:
        self.keys.refused(request)
        left = () if now is None else self.limits.rate_limits(request.tenant, request.priority, now)
        return reject(reply_to(request), refusal, traceparent, left)
