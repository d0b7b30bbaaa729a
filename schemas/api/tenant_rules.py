"""What a tenant may not ask for, as its client is told, whichever door it comes by. Pure."""

from dataclasses import replace

from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared
from schemas.priority import PriorityClass
from schemas.records import Tenant
from schemas.sampling import SamplingParams
from schemas.tenants import MAX_TOKENS_TOO_LARGE, MODEL_NOT_ALLOWED, allows_model, most_tokens


def check_model(tenant: Tenant, model: str) -> None:
    """Raises ApiError 403."""
    if not allows_model(tenant, model):
        message = f"model: {model!r} is not among the models of this tenant"
        raise ApiError(403, MODEL_NOT_ALLOWED, message, "model")


def sampling_for(tenant: Tenant, priority: PriorityClass, prepared: Prepared) -> SamplingParams:
    """Of `prepared`, with no more tokens than the tenant may ask for: a default is lowered to that.

    Raises ApiError 403 for the model, 400 that names the field for more tokens that were asked for.
    """
    check_model(tenant, prepared.model.spec.id)
    sampling, most = prepared.sampling, most_tokens(tenant, priority)
    if most is None or sampling.max_tokens <= most:
        return sampling
    field = prepared.limit_field
    if field is None and sampling.min_tokens > most:
        field = "min_tokens"
    if field is not None:
        asked = sampling.min_tokens if field == "min_tokens" else sampling.max_tokens
        message = f"{field}: {asked} are more than the {most} tokens that this tenant may ask for"
        raise ApiError(400, MAX_TOKENS_TOO_LARGE, message, field)
    return replace(sampling, max_tokens=most)
