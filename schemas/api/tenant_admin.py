"""Tenants as administrators see and change them, by HTTP or on the command line. Pure.

Limits are named by class: {"interactive": {"tokens_per_minute": 60000}}. What is not named is not changed;
null is unlimited. So is it with a budget: {"budget": {"amount": "100"}} leaves its other fields as they are.
"""

from dataclasses import asdict, replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemas.api.errors import ApiError, bad_field
from schemas.budgets import DEFAULT_ALERT_PERCENTS, DEFAULT_CURRENCY, BudgetError, Standing, check_budget
from schemas.priority import PriorityClass
from schemas.records import ApiKey, Budget, ClassLimits, Tenant
from schemas.topics import check_tenant

Limit = Annotated[int, Meta(ge=0, le=2**53)] | UnsetType | None
Name = Annotated[str, Meta(pattern="^[a-z0-9-]{1,40}$")]
Weight = Annotated[float, Meta(ge=0.001, le=1_000_000)]
Models = Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=1_000)]


class LimitsBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Limits in one class."""

    tokens_per_minute: Annotated[Limit, Meta(description="Input and output tokens a minute")] = UNSET
    input_tokens_per_minute: Annotated[Limit, Meta(description="Input tokens a minute")] = UNSET
    output_tokens_per_minute: Annotated[Limit, Meta(description="Output tokens a minute")] = UNSET
    requests_per_minute: Annotated[Limit, Meta(description="Requests a minute")] = UNSET
    max_concurrent_requests: Annotated[Limit, Meta(description="Requests at once")] = UNSET
    max_enqueued_tokens: Annotated[Limit, Meta(description="Tokens waiting, of batch requests")] = UNSET
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**53)] | UnsetType | None,
        Meta(description="Most output tokens of a request"),
    ] = UNSET


class ByClass(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    interactive: LimitsBody | UnsetType = UNSET
    free: LimitsBody | UnsetType = UNSET
    batch: LimitsBody | UnsetType = UNSET


class BudgetBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What it may spend in a month (UTC)."""

    amount: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")] | UnsetType,
        Meta(description="A decimal; a budget that is new must say it"),
    ] = UNSET
    currency: Annotated[
        Annotated[str, Meta(pattern="^[A-Z]{3}$")] | UnsetType,
        Meta(description="As prices have it; what costs another one does not count. USD if not said"),
    ] = UNSET
    alert_percents: Annotated[
        Annotated[list[Annotated[int, Meta(ge=1, le=100)]], Meta(max_length=10)] | UnsetType,
        Meta(description="Operators are told once when so much is spent; 80 if not said"),
    ] = UNSET
    hard_stop: Annotated[
        bool | UnsetType,
        Meta(description="With all of it spent new requests are refused, if not said otherwise"),
    ] = UNSET


class TenantChange(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be other than it is."""

    tier: str | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET
    allowed_models: Models | UnsetType | None = UNSET
    limits: ByClass | UnsetType = UNSET
    budget: BudgetBody | UnsetType | None = UNSET


class NewTenant(TenantChange, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A tenant to be made: of tier interactive, without limits, where nothing else is said."""

    name: Name


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """`keep`: the keys there are stay good."""

    keep: bool = False


def created(body: NewTenant, key: ApiKey) -> Tenant:
    """Raises ApiError that names the field."""
    try:
        check_tenant(body.name)
    except ValueError as e:
        raise bad_field("name", str(e)) from None
    return changed(Tenant(body.name, PriorityClass.INTERACTIVE, [key], []), body)


def changed(tenant: Tenant, change: TenantChange) -> Tenant:
    """Raises ApiError that names the field."""
    fields: dict[str, Any] = {}
    for name in ("weight", "disabled", "allowed_models"):
        value = getattr(change, name)
        if value is not UNSET:
            fields[name] = value
    if change.tier is not UNSET:
        try:
            fields["tier"] = int(PriorityClass.parse(change.tier))
        except ValueError as e:
            raise bad_field("tier", str(e)) from None
    if change.limits is not UNSET:
        fields["limits"] = _limits(tenant, change.limits)
    if change.budget is not UNSET:
        fields["budget"] = None if change.budget is None else _budget(tenant.budget, change.budget)
    return replace(tenant, **fields)


def with_key(tenant: Tenant, key: ApiKey, *, keep: bool) -> Tenant:
    """`keep`: the keys there are stay good."""
    return replace(tenant, keys=[*tenant.keys, key] if keep else [key])


def view(tenant: Tenant, version: int, standing: Standing | None = None) -> dict[str, Any]:
    """As JSON. Of keys only what finds them; `version` changes with each change. `standing`: this
    month's, where it has a budget."""
    limits = {entry.priority: entry for entry in tenant.limits}
    return {
        "object": "tenant",
        "name": tenant.name,
        "version": version,
        "tier": PriorityClass(tenant.tier).label,
        "weight": tenant.weight,
        "disabled": tenant.disabled,
        "allowed_models": tenant.allowed_models,
        "budget": None if tenant.budget is None else asdict(tenant.budget),
        "spend": None if standing is None else standing.view(),
        "limits": {
            c.label: {name: value for name, value in asdict(limits[c]).items() if name != "priority"}
            for c in PriorityClass
            if c in limits
        },
        "keys": [{"key_id": key.key_id, "created_at": key.created_at} for key in tenant.keys],
    }


def limit_descriptions() -> dict[str, str]:
    """What each limit is of, by its name."""
    schema = msgspec.json.schema(LimitsBody)["$defs"]["LimitsBody"]
    return {name: field["description"] for name, field in schema["properties"].items()}


def not_found(name: str) -> ApiError:
    return ApiError(404, "tenant_not_found", f"there is no tenant {name[:60]!r}")


def _budget(known: Budget | None, change: BudgetBody) -> Budget:
    if known is None:
        if change.amount is UNSET:
            raise bad_field("budget.amount", "say how much a new budget is")
        known = Budget("", DEFAULT_CURRENCY, list(DEFAULT_ALERT_PERCENTS))
    named = {
        name: value for name in BudgetBody.__struct_fields__ if (value := getattr(change, name)) is not UNSET
    }
    try:
        return check_budget(replace(known, **named))
    except BudgetError as e:
        raise ApiError(400, "invalid_value", str(e), str(e).partition(" ")[0].rstrip(":")) from None


def _limits(tenant: Tenant, change: ByClass) -> list[ClassLimits]:
    known = {entry.priority: entry for entry in tenant.limits}
    for priority in PriorityClass:
        wanted = getattr(change, priority.label)
        if wanted is UNSET:
            continue
        named = {
            name: value
            for name in LimitsBody.__struct_fields__
            if (value := getattr(wanted, name)) is not UNSET
        }
        entry = replace(known.get(priority) or ClassLimits(int(priority)), **named)
        known[priority] = entry
        if entry == ClassLimits(int(priority)):
            del known[priority]
    return [known[priority] for priority in sorted(known)]
