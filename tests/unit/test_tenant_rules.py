"""What a tenant's record does to what a body asks for, at every door."""

import json
from typing import Any

import pytest

from schemas.api.bodies import ChatCompletionBody, GenerateBody, decode_body
from schemas.api.errors import ApiError
from schemas.api.prepare import Prepared, prepare
from schemas.api.tenant_rules import sampling_for
from schemas.priority import PriorityClass
from schemas.records import ClassLimits, Tenant
from streams.ledger.batch_records import BadRecord, parse
from tests.gateway_factories import MODEL as LOADED

MODEL = "simulated"
MODELS = {MODEL: LOADED}
CAPPED = Tenant("acme", 0, [], [ClassLimits(1, max_tokens=5), ClassLimits(2, max_tokens=7)])


def prepared(kind: Any = GenerateBody, **fields: Any) -> Prepared:
    body = {"model": MODEL, **({"prompt": "hello"} if kind is GenerateBody else {}), **fields}
    return prepare(decode_body(json.dumps(body).encode(), kind), MODELS)


@pytest.mark.parametrize(
    ("kind", "field", "extra"),
    [
        (GenerateBody, "max_tokens", {}),
        (ChatCompletionBody, "max_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        (ChatCompletionBody, "max_completion_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_more_than_the_tenant_may_ask_for_is_refused_by_name(
    kind: Any, field: str, extra: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        sampling_for(CAPPED, PriorityClass.FREE, prepared(kind, **{field: 6}, **extra))
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "max_tokens_too_large", field)
    assert sampling_for(CAPPED, PriorityClass.FREE, prepared(kind, **{field: 5}, **extra)).max_tokens == 5


def test_a_default_is_lowered_to_what_the_tenant_may_ask_for() -> None:
    assert sampling_for(CAPPED, PriorityClass.FREE, prepared()).max_tokens == 5
    assert sampling_for(CAPPED, PriorityClass.BATCH, prepared()).max_tokens == 7
    unlimited = sampling_for(CAPPED, PriorityClass.INTERACTIVE, prepared()).max_tokens
    assert unlimited == prepared().sampling.max_tokens > 7


def test_min_tokens_above_a_lowered_default_is_refused_by_name() -> None:
    with pytest.raises(ApiError) as refused:
        sampling_for(CAPPED, PriorityClass.FREE, prepared(min_tokens=6))
    assert refused.value.param == "min_tokens"


def test_models_that_are_not_the_tenants_are_refused() -> None:
    for allowed in (None, [MODEL]):
        sampling_for(Tenant("acme", 0, [], [], allowed_models=allowed), PriorityClass.FREE, prepared())
    for allowed in (["other"], []):
        tenant = Tenant("acme", 0, [], [], allowed_models=allowed)
        with pytest.raises(ApiError) as refused:
            sampling_for(tenant, PriorityClass.FREE, prepared())
        error = refused.value
        assert (error.status, error.code, error.param) == (403, "model_not_allowed", "model")


def test_batch_records_are_held_to_it_too() -> None:
    record: dict[str, Any] = {"custom_id": "a", "model": MODEL, "prompt": "hello"}
    item = parse(json.dumps(record).encode(), "acme", 0, 0, MODELS, CAPPED)
    assert not isinstance(item, BadRecord)
    assert item.sampling.max_tokens == 7
    bad = parse(json.dumps({**record, "max_tokens": 8}).encode(), "acme", 0, 0, MODELS, CAPPED)
    assert isinstance(bad, BadRecord)
    assert bad.error.code == "max_tokens_too_large"
