"""Who is let in: the checks of one request, in order, before anything is kept of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from schemas.records import Duplicate, InferenceRequest
from streams.admission.budgets import Budgets
from streams.admission.decisions import DecisionLog
from streams.admission.fair_queue import QueuedRequest
from streams.admission.idempotency import IdempotencyKeys
from streams.admission.limits import Limits
from streams.admission.overload import Overload
from streams.admission.prediction import OutputPredictor
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.router import Router
from streams.admission.shedding import ShedLevel
from streams.admission.tenants import Tenants
from streams.admission.validation import too_long
from streams.admission.waiting import WaitingPolicy, expired, wait_until


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is not let in, and the figures that were seen of it if it came so far."""

    refusal: Refusal
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Screening:
    policy: WaitingPolicy
    decisions: DecisionLog
    tenants: Tenants
    budgets: Budgets
    limits: Limits
    router: Router
    overload: Overload
    predictor: OutputPredictor
    keys: IdempotencyKeys

    def screen(
        self,
        request: InferenceRequest,
        record: bytes,
        partition: int,
        offset: int,
        traceparent: str | None,
        now: int,
    ) -> QueuedRequest | Duplicate | Refused:
        """What is to wait, its tokens reserved; or why not. `request.sampling.max_tokens` may be lowered."""
        # 1. What no load decides.
        match self.keys.check(request, partition):
            case Duplicate() as duplicate:
                return duplicate
            case Refusal() as reused:
                return Refused(reused)
        end_at = wait_until(self.policy, request)
        unfit = (
            self.tenants.refusal(request)
            or (expired(RETRY_LATER_MS) if end_at <= now else None)
            or too_long(request, self.router.workers(request.model))
        )
        if unfit is not None:
            return Refused(unfit)
        # 2. What its tenant may spend, and what the load allows.
        expected = self.predictor.expect_rest(request)
        weight = self.tenants.weight(request.tenant)
        seen = self.overload.arrival(request, expected, weight, now, self.budgets.left(request))
        denied = self.budgets.refusal(request, now) or self.policy.overload.refusal(request, seen)
        if denied is None:
            if (cap := self.policy.overload.cap(request, seen)) is not None:
                request.sampling = replace(request.sampling, max_tokens=cap)
                expected = min(expected, cap)
                record = b""  # it is another request now
                self.decisions.capped(request, seen, cap)
            # 3. What the tenant may use; last, for it takes from it.
            denied = self.limits.reserve(
                request.request_id,
                request.attempt,
                request.tenant,
                request.priority,
                len(request.prompt_token_ids),
                request.sampling.max_tokens,
                request.accepted_at + request.end_ms,
                now,
                partition=partition,
            )
            if cap is not None and denied is None:
                self.overload.shed[ShedLevel.CAP_FREE] += 1
        if denied is not None:
            self.overload.refused(denied)
            return Refused(denied, {**seen.inputs(), **self._used(request, now)})
        return QueuedRequest(
            request=request,
            partition=partition,
            offset=offset,
            tokens=seen.prompt_tokens + len(request.output_token_ids) + expected,
            expected_output_tokens=expected,
            queued_at=now,
            end_at=end_at,
            record=record,
            traceparent=traceparent,
            rate_limits=self.limits.rate_limits(request.tenant, request.priority, now),
            arrival=seen,
        )

    def _used(self, request: InferenceRequest, now: int) -> dict[str, float]:
        """What the tenant has open, and what is left of its limits a minute."""
        tenant, priority = request.tenant, request.priority
        figures = {
            "tenant_concurrent": float(self.limits.num_concurrent(tenant, priority)),
            "tenant_reserved_tokens": float(self.limits.reserved_tokens(tenant, priority)),
        }
        for limit in self.limits.rate_limits(tenant, priority, now):
            figures[f"remaining_{limit.name}"] = float(limit.remaining)
        return figures
