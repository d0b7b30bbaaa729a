"""/v1/models in the shapes of two APIs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.offered_models import OfferedModels
from tests.gateway_factories import MODEL, Call, Stand

VERSION = [(b"anthropic-version", b"2023-06-01")]


def stand() -> Stand:
    made = Stand()
    made.serving.offered = OfferedModels(Path(), dict.fromkeys(("a", "b", "c", "d"), MODEL))
    made.serving.models_loaded_at = 1_700_000_000
    return made


async def get(path: str = "/v1/models", query: bytes = b"", headers: Any = VERSION) -> Call:
    return await stand().call("GET", path, query=query, headers=headers).finish()


async def test_openais_clients_get_openais_list() -> None:
    answer = (await get(headers=())).json()
    assert (answer["object"], [model["id"] for model in answer["data"]]) == ("list", ["a", "b", "c", "d"])


async def test_a_tenant_sees_the_models_it_may_ask_for() -> None:
    made = stand()
    tenant = made.serving.tenants.named("acme")
    made.serving.tenants.put("acme", replace(tenant, allowed_models=["b", "d", "gone"]))
    for headers in ((), VERSION):
        answer = (await made.call("GET", "/v1/models", headers=headers).finish()).json()
        assert [model["id"] for model in answer["data"]] == ["b", "d"]
    assert (await made.call("GET", "/v1/models/b").finish()).status == 200
    refused = await made.call("GET", "/v1/models/a").finish()
    assert (refused.status, refused.json()["error"]["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {"prompt": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [104]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_tenant_is_told_nothing_by_a_model_that_it_may_not_ask_for(
    path: str, body: dict[str, Any]
) -> None:
    made = stand()
    tenant = made.serving.tenants.named("acme")
    made.serving.tenants.put("acme", replace(tenant, allowed_models=["b"]))
    refused = await made.call("POST", path, body={"model": "a", **body}, headers=VERSION).finish()
    assert refused.status == 403
    assert refused.json()["error"]["message"].endswith("is not among the models of this tenant")
    if path != "/v1/generate":
        answer = await made.call("POST", path, body={"model": "b", **body}, headers=VERSION).finish()
        assert answer.status == 200


async def test_a_model_in_anthropics_shape() -> None:
    expected = {
        "type": "model",
        "id": "b",
        "display_name": "b",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": MODEL.spec.max_model_len,
        "max_tokens": MODEL.spec.max_model_len,
    }
    assert (await get("/v1/models/b")).json() == expected
    listed = (await get()).json()
    assert listed["data"][1] == expected
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "a", "d")


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        (b"limit=3", "abc", True),
        (b"limit=2&after_id=b", "cd", False),
        (b"after_id=d", "", False),
        (b"limit=1&before_id=c", "b", True),
        (b"before_id=c", "ab", False),
    ],
)
async def test_pages(query: bytes, ids: str, has_more: bool) -> None:
    page = (await get(query=query)).json()
    assert ("".join(model["id"] for model in page["data"]), page["has_more"]) == (ids, has_more)


@pytest.mark.parametrize(
    ("query", "field"), [(b"limit=0", "limit"), (b"limit=x", "limit"), (b"after_id=z", "after_id")]
)
async def test_refusals_have_anthropics_shape_and_name_the_field(query: bytes, field: str) -> None:
    refused = await get(query=query)
    assert refused.status == 400
    error = json.loads(refused.content)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(f"{field}: ")
    missing = await get("/v1/models/z")
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert b"request-id" in missing.headers
