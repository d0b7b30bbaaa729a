"""Who has spent the month's budget is let in no more: the fold of control.spend against control.tenants."""

from decimal import Decimal

from schemas.budgets import month_end, month_of, spent_in
from schemas.records import InferenceRequest, Spend
from streams.admission.arrival import BUDGET_EXCEEDED
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.tenants import Tenants


class Budgets:
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._spend: dict[str, dict[str, Spend]] = {}

    def put(self, key: str, spend: Spend | None) -> None:
        """A record of the topic; None takes it back. Of a tenant the last two months are kept: what was
        accepted before the end of one is billed to it behind it."""
        tenant, _, month = key.rpartition("/")
        if spend is None:
            self._spend.get(tenant, {}).pop(month, None)
            return
        months = self._spend.setdefault(tenant, {})
        months[month] = spend
        for gone in sorted(months)[:-2]:
            del months[gone]

    def left(self, request: InferenceRequest) -> Decimal | None:
        """What its tenant may still spend in its month: nothing is left at 0 and below. None where no budget
        stops it. A retry was let in: what it costs is spent already."""
        budget = self._tenants.budget(request.tenant)
        if budget is None or not budget.hard_stop or request.attempt > 1:
            return None
        spend = self._spend.get(request.tenant, {}).get(month_of(request.accepted_at))
        return Decimal(budget.amount) - spent_in(spend, budget.currency)

    def refusal(self, request: InferenceRequest, now: int) -> Refusal | None:
        """Why the request may not be let in, or None."""
        left, budget = self.left(request), self._tenants.budget(request.tenant)
        if budget is None or left is None or left > 0:
            return None
        month = month_of(request.accepted_at)
        end, spent = month_end(month), Decimal(budget.amount) - left
        message = (
            f"budget: tenant {request.tenant!r} has spent {spent:f} of its budget of {budget.amount} "
            f"{budget.currency} for {month}; it is served again from {end:%Y-%m-%dT%H:%M:%SZ} on, or as soon "
            "as the budget is raised"
        )
        retry_after_ms = max(RETRY_LATER_MS, int(end.timestamp() * 1000) - now)
        return Refusal(429, BUDGET_EXCEEDED, message, retry_after_ms)
