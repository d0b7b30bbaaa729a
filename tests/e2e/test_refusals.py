"""Refusals over the whole stack are real status codes in OpenAI's shape."""

import time
from typing import Any

import httpx
import pytest

from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from tests.e2e.conftest import ADMIN_KEY, RunningStack

PATHS = ("/v1/generate", "/v1/chat/completions", "/v1/completions")


def body_for(path: str, running: RunningStack, **changes: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": running.model, "max_tokens": 2, **asked, **changes}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", PATHS)
def test_bad_requests_name_the_field(simulated_stack: RunningStack, path: str) -> None:
    with simulated_stack.client() as client:

        def post(**changes: Any) -> httpx.Response:
            return client.post(path, json=body_for(path, simulated_stack, **changes))

        assert error_of(post(model="gpt-9"), 404)["param"] == "model"
        assert error_of(post(max_tokens=0), 400)["param"] == "max_tokens"
        assert error_of(post(max_tokens=10**6), 400)["code"] == "context_length_exceeded"
        assert error_of(post(colour="red"), 400)["param"] == "colour"
        assert error_of(client.post(path, content=b"{"), 400)["code"] == "invalid_json"
        error_of(client.get(path), 405)
        error_of(client.post(path + "x", json={}), 404)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_keys_are_401(simulated_stack: RunningStack, path: str) -> None:
    body = body_for(path, simulated_stack)
    url = simulated_stack.stack.url() + path
    for headers in (
        {},
        {"Authorization": "Bearer hr_wrong"},
        {"x-api-key": "x"},
        {"Authorization": "Basic x"},
    ):
        error_of(httpx.post(url, json=body, headers=headers), 401)
    good = httpx.post(url, json=body, headers={"x-api-key": simulated_stack.api_key}, timeout=30)
    assert good.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_class_above_the_tier_is_403_and_the_batch_class_is_served(
    simulated_stack: RunningStack, stream: bool
) -> None:
    key = simulated_stack.tenant(f"free-{stream}".lower(), tier=PriorityClass.FREE)
    with simulated_stack.client(key) as client:
        for priority, status in (("interactive", 403), ("free", 200), ("batch", 200)):
            body = body_for("/v1/generate", simulated_stack, priority=priority, stream=stream)
            assert client.post("/v1/generate", json=body).status_code == status, priority


@pytest.mark.parametrize("stream", [False, True])
def test_over_the_limit_is_429_with_retry_after(simulated_stack: RunningStack, stream: bool) -> None:
    limits = [ClassLimits(c, tokens_per_minute=100) for c in PriorityClass]
    key = simulated_stack.tenant(f"limited-{stream}".lower(), limits=limits)
    with simulated_stack.client(key) as client:

        def ask(max_tokens: int) -> httpx.Response:
            body = body_for("/v1/generate", simulated_stack, max_tokens=max_tokens, stream=stream)
            return client.post("/v1/generate", json=body)

        assert ask(60).status_code == 200
        refused = ask(60)
        error_of(refused, 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask(10).status_code == 200  # what is left is still there


def test_five_parallel_requests_never_exceed_the_limit(simulated_stack: RunningStack) -> None:
    from concurrent.futures import ThreadPoolExecutor

    limits = [ClassLimits(c, tokens_per_minute=100) for c in PriorityClass]
    key = simulated_stack.tenant("parallel", limits=limits)
    body = body_for("/v1/generate", simulated_stack, max_tokens=40)
    with simulated_stack.client(key) as client, ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/generate", json=body), range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]


def test_what_an_administrator_says_is_in_force_within_two_seconds(simulated_stack: RunningStack) -> None:
    """At gateways and at admission, with no restart of either."""
    body = body_for("/v1/generate", simulated_stack, max_tokens=8)
    with simulated_stack.client(ADMIN_KEY) as admin:
        made = admin.post("/admin/v1/tenants", json={"name": "managed"})
        assert made.status_code == 201
        key = made.json()["key"]

        def change(**fields: Any) -> None:
            assert admin.patch("/admin/v1/tenants/managed", json=fields).status_code == 200

        with simulated_stack.client(key) as client:

            def within_two_seconds(status: int, code: str | None = None) -> None:
                deadline = time.monotonic() + 2.0
                while True:
                    answer = client.post("/v1/generate", json=body)
                    found = answer.json().get("error", {}).get("code")
                    if (answer.status_code, found) == (status, code):
                        return
                    assert time.monotonic() < deadline, answer.text

            within_two_seconds(200)
            change(limits={"interactive": {"max_tokens": 4}})  # the gateway's to refuse
            within_two_seconds(400, "max_tokens_too_large")
            change(limits={"interactive": {"max_tokens": None, "tokens_per_minute": 1}})  # admission's
            within_two_seconds(400, "tokens_per_minute_exceeded")
            change(limits={"interactive": {"tokens_per_minute": None}}, allowed_models=[])
            within_two_seconds(403, "model_not_allowed")
            change(allowed_models=None)
            within_two_seconds(200)
            assert admin.delete("/admin/v1/tenants/managed").status_code == 200
            within_two_seconds(401, "invalid_api_key")
