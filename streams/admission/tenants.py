"""The tenants in force: the fold of control.tenants."""

from schemas.budgets import check_budget
from schemas.priority import PriorityClass
from schemas.records import Budget, InferenceRequest, Tenant
from schemas.tenants import MAX_TOKENS_TOO_LARGE, MODEL_NOT_ALLOWED, allows_model, most_tokens
from streams.admission.limits import Limits
from streams.admission.refusal import Refusal

# A weight of zero or less would divide by zero in the queue.
MIN_WEIGHT = 1e-3


class Tenants:
    """Keeps `limits` told of every change."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tenants: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, name: str) -> bool:
        return name in self._tenants

    def put(self, name: str, tenant: Tenant | None, now: int) -> None:
        """A record of the topic; None is a deletion.

        Raises ValueError for a tier that is no class and a budget that is none; the tenant stays as it was.
        """
        if tenant is None:
            self._tenants.pop(name, None)
            self._limits.remove_tenant(name)
        else:
            PriorityClass(tenant.tier)
            if tenant.budget is not None:
                check_budget(tenant.budget)
            self._tenants[tenant.name] = tenant
            self._limits.set_tenant(tenant, now)

    def refusal(self, request: InferenceRequest) -> Refusal | None:
        """Why the tenant may not ask for this, or None."""
        name, priority = request.tenant, request.priority
        tenant = self._tenants.get(name)
        if tenant is None:
            return Refusal(403, "unknown_tenant", f"there is no tenant {name!r}")
        if tenant.disabled:
            return Refusal(403, "tenant_disabled", f"tenant {name!r} is disabled")
        if priority < tenant.tier:
            tier = PriorityClass(tenant.tier).label
            return Refusal(403, "class_not_allowed", f"the highest class of tenant {name!r} is {tier}")
        if request.attempt > 1:
            return None  # it was let in
        if not allows_model(tenant, request.model):
            return Refusal(
                403, MODEL_NOT_ALLOWED, f"model: tenant {name!r} may not ask for {request.model!r}"
            )
        most = most_tokens(tenant, priority)
        if most is not None and request.sampling.max_tokens > most:
            message = f"max_tokens: tenant {name!r} may ask for {most} tokens at most"
            return Refusal(400, MAX_TOKENS_TOO_LARGE, message)
        return None

    def weight(self, name: str) -> float:
        tenant = self._tenants.get(name)
        return 1.0 if tenant is None else max(MIN_WEIGHT, tenant.weight)

    def budget(self, name: str) -> Budget | None:
        """What the tenant may spend in a month; None is what it will."""
        tenant = self._tenants.get(name)
        return None if tenant is None else tenant.budget

    def max_enqueued_tokens(self, name: str, priority: int) -> int | None:
        """The tenant's allowance of waiting tokens in a class; None is unlimited."""
        tenant = self._tenants.get(name)
        limits = () if tenant is None else tenant.limits
        return next((entry.max_enqueued_tokens for entry in limits if entry.priority == priority), None)
