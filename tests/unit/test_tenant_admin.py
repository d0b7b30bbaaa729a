"""How administrators say what a tenant may use: by HTTP and on the command line alike."""

import json
from dataclasses import fields
from typing import Any

import pytest

from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError
from schemas.api.tenant_admin import LimitsBody, NewTenant, TenantChange, changed, created, view, with_key
from schemas.records import ApiKey, ClassLimits, Tenant

KEY = ApiKey("hr_12345678", bytes(32), 5)


def new(**body: Any) -> Tenant:
    return created(decode_body(json.dumps({"name": "acme", **body}).encode(), NewTenant), KEY)


def change(tenant: Tenant, **body: Any) -> Tenant:
    return changed(tenant, decode_body(json.dumps(body).encode(), TenantChange))


def test_a_tenant_of_which_nothing_is_said_is_unlimited_and_of_the_highest_tier() -> None:
    assert new() == Tenant("acme", 0, [KEY], [])


def test_limits_are_named_by_class_and_what_is_not_named_stays() -> None:
    limits = {"free": {"tokens_per_minute": 100, "max_tokens": 9}, "batch": {"max_enqueued_tokens": 7}}
    tenant = new(tier="free", weight=2.5, allowed_models=["m"], limits=limits)
    free = ClassLimits(1, tokens_per_minute=100, max_tokens=9)
    batch = ClassLimits(2, max_enqueued_tokens=7)
    assert tenant == Tenant("acme", 1, [KEY], [free, batch], 2.5, False, ["m"])
    tenant = change(tenant, limits={"free": {"tokens_per_minute": None, "requests_per_minute": 3}})
    assert tenant.limits == [ClassLimits(1, requests_per_minute=3, max_tokens=9), batch]
    tenant = change(tenant, disabled=True, limits={"batch": {"max_enqueued_tokens": None}})
    assert tenant.limits == [ClassLimits(1, requests_per_minute=3, max_tokens=9)]
    assert (tenant.disabled, tenant.weight, tenant.allowed_models) == (True, 2.5, ["m"])
    assert change(tenant, allowed_models=None).allowed_models is None


def test_every_limit_there_is_can_be_named() -> None:
    assert set(LimitsBody.__struct_fields__) == {f.name for f in fields(ClassLimits)} - {"priority"}


def test_what_is_shown_can_be_said() -> None:
    tenant = new(limits={"free": {"tokens_per_minute": 100}}, allowed_models=[])
    shown = view(tenant, 7)
    assert shown["keys"] == [{"key_id": "hr_12345678", "created_at": 5}]
    assert (shown["version"], shown["tier"]) == (7, "interactive")
    said = {name: shown[name] for name in ("tier", "weight", "disabled", "allowed_models", "limits")}
    assert new(**said) == tenant
    assert "sha256" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "Acme"}, "name"),
        ({"tier": "gold"}, "tier"),
        ({"weight": 0}, "weight"),
        ({"limits": {"gold": {}}}, "limits.gold"),
        ({"limits": {"free": {"tokens_per_minute": -1}}}, "limits.free.tokens_per_minute"),
        ({"limits": {"free": {"tokens": 1}}}, "limits.free.tokens"),
        ({"limits": {"free": {"max_tokens": 0}}}, "limits.free.max_tokens"),
        ({"allowed_models": "m"}, "allowed_models"),
        ({"keys": []}, "keys"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        new(**body)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_a_new_key_takes_the_place_of_the_others_unless_they_are_kept() -> None:
    other = ApiKey("hr_other", bytes(32), 6)
    assert with_key(new(), other, keep=True).keys == [KEY, other]
    assert with_key(new(), other, keep=False).keys == [other]
