"""What a tenant's record says of a request. Pure, and cheap to import."""

from schemas.records import Tenant

MODEL_NOT_ALLOWED = "model_not_allowed"
MAX_TOKENS_TOO_LARGE = "max_tokens_too_large"


def allows_model(tenant: Tenant, model: str) -> bool:
    return tenant.allowed_models is None or model in tenant.allowed_models


def most_tokens(tenant: Tenant, priority: int) -> int | None:
    """Most output tokens that a request of the class may ask for; None is what the model has room for."""
    return next((entry.max_tokens for entry in tenant.limits if entry.priority == priority), None)
