"""The served OpenAPI document against the routes, the bodies and the table of refusals."""

import json
from typing import Any

import jsonschema_rs
import pytest

from gateway.app import OPERATIONS
from gateway.openapi import ALL_DESCRIBED, document, openapi_json
from schemas.api.refusals import REFUSALS
from schemas.records import Dispatched, RateLimit
from tests.gateway_factories import EPOCH, WORKER_EPOCH, Stand
from tests.unit.test_gateway_refusals import GOOD, Refusal
from tests.unit.test_gateway_refusals import REFUSALS as CASES


def schema_of(method: str, path: str, status: int) -> dict[str, Any]:
    whole = document()
    content = whole["paths"][path][method.lower()]["responses"][str(status)]["content"]
    return {**content["application/json"]["schema"], "components": whole["components"]}


def test_it_has_what_is_routed_and_nothing_else() -> None:
    routed = {(each.method, each.path.replace(":path", "")) for each in OPERATIONS}
    assert set(ALL_DESCRIBED) == routed


async def test_it_is_served_without_a_key() -> None:
    call = await Stand().call("GET", "/openapi.json", key=None).finish()
    assert call.status == 200
    assert call.headers[b"content-type"] == b"application/json"
    assert call.content == openapi_json()
    assert json.loads(call.content)["openapi"] == "3.1.0"


def test_operations_have_names_of_their_own_and_all_references_lead_somewhere() -> None:
    whole = json.loads(openapi_json())
    ids = [op["operationId"] for path in whole["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids)) == len(ALL_DESCRIBED)

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    names = {found.removeprefix("#/components/schemas/") for found in references(whole)}
    assert names <= set(whole["components"]["schemas"])


@pytest.mark.parametrize("path", GOOD)
def test_good_bodies_fit_their_schemas(path: str) -> None:
    whole = document()
    body = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema_rs.Draft202012Validator({**body, "components": whole["components"]})
    assert validator.is_valid(GOOD[path])
    assert not validator.is_valid({**GOOD[path], "no_such_field": 1})
    assert not validator.is_valid({})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}),
        (
            "/v1/messages",
            {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
        ),
    ],
)
async def test_what_an_answers_headers_tell_is_described(path: str, body: dict[str, Any]) -> None:
    stand = Stand()
    call = stand.call(path=path, body=body)
    request = await stand.request()
    left = [
        RateLimit(name, 60, 59, 1_000) for name in ("requests", "tokens", "input_tokens", "output_tokens")
    ]
    run = (0, WORKER_EPOCH, request.model)
    stand.tell(Dispatched(request.request_id, 1, EPOCH, *run, rate_limits=left, max_tokens=2))
    stand.complete(request, 0)
    await call.finish()
    of_any_answer = {"content-type", "content-length", "x-request-id", "openai-processing-ms", "request-id"}
    told = {name.decode() for name in call.headers} - of_any_answer
    responses = document()["paths"][path]["post"]["responses"]
    assert told == set(responses["200"]["headers"])
    assert {name for name in told if "ratelimit" in name} <= set(responses["429"]["headers"])


def test_each_code_that_a_client_can_be_told_stands_at_its_status() -> None:
    schemas = document()["components"]["schemas"]
    told = {
        (int(name.removeprefix("Error")), code)
        for name, schema in schemas.items()
        if name.startswith("Error")
        for code in schema["properties"]["error"]["properties"]["code"]["enum"]
    }
    hidden = {"invalid_avro", "batch_expired", "undecodable_record", "enqueued_tokens_exceeded"}
    hidden |= {"unreadable_batch", "record_too_large"}
    hidden |= {"line_too_long", "duplicate_custom_id", "input_file_changed"}  # of a batch's file
    assert told == {(k.status, k.code) for k in REFUSALS if k.status != 499 and k.code not in hidden}


_TOLD = [
    case
    for case in CASES
    # Not a path or method of it; and a code that the tests made up.
    if (case.method, case.path) in ALL_DESCRIBED and case.code != "rate_limit_exceeded"
]


@pytest.mark.parametrize("case", _TOLD, ids=[case.name for case in _TOLD])
async def test_refusals_are_as_it_says(case: Refusal) -> None:
    stand = Stand(**case.settings)
    if case.arrange is not None:
        case.arrange(stand)
    call = await stand.call(case.method, case.path, body=case.body, **case.options).finish()
    schema = schema_of(case.method, case.path, call.status)
    jsonschema_rs.Draft202012Validator(schema).validate(call.json())
