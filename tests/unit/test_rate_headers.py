"""What is left of a tenant's limits, in the headers of both APIs."""

import asyncio
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from gateway.rate_headers import duration, rate_header_objects, rate_headers
from schemas.records import Admitted, ClassLimits, Dispatched, RateLimit, Rejected
from tests.gateway_factories import EPOCH, WORKER_EPOCH, Stand

NOW_S = 1_700_000_000.25  # 2023-11-14T22:13:20.25Z
REQUESTS = RateLimit("requests", 60, 59, 1_000)
TOKENS = RateLimit("tokens", 10_000, 8_200, 10_800)
INPUT = RateLimit("input_tokens", 9_000, 8_500, 3_334)
OUTPUT = RateLimit("output_tokens", 500, 300, 24_000)


def text(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def test_openai() -> None:
    assert text(rate_headers([REQUESTS, TOKENS], anthropic=False, now_s=NOW_S)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "10000",
        "x-ratelimit-remaining-tokens": "8200",
        "x-ratelimit-reset-tokens": "10.8s",
    }


def test_anthropic() -> None:
    assert text(rate_headers([INPUT, OUTPUT], anthropic=True, now_s=NOW_S)) == {
        "anthropic-ratelimit-input-tokens-limit": "9000",
        "anthropic-ratelimit-input-tokens-remaining": "8500",
        "anthropic-ratelimit-input-tokens-reset": "2023-11-14T22:13:24Z",
        "anthropic-ratelimit-output-tokens-limit": "500",
        "anthropic-ratelimit-output-tokens-remaining": "300",
        "anthropic-ratelimit-output-tokens-reset": "2023-11-14T22:13:45Z",
        "anthropic-ratelimit-tokens-limit": "500",
        "anthropic-ratelimit-tokens-remaining": "300",
        "anthropic-ratelimit-tokens-reset": "2023-11-14T22:13:45Z",
    }


def test_of_several_choices_that_with_the_least_left_counts() -> None:
    later = RateLimit("tokens", 10_000, 7_000, 18_000)
    found = text(rate_headers([later, TOKENS, OUTPUT], anthropic=False, now_s=NOW_S))
    assert found["x-ratelimit-remaining-tokens"] == "300"
    found = text(rate_headers([TOKENS, later], anthropic=False, now_s=NOW_S))
    assert (found["x-ratelimit-remaining-tokens"], found["x-ratelimit-reset-tokens"]) == ("7000", "18s")


def test_a_tenant_without_limits_is_told_nothing() -> None:
    assert (
        rate_headers([], anthropic=False, now_s=NOW_S) == rate_headers([], anthropic=True, now_s=NOW_S) == []
    )


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (0, "0s"),
        (1, "1ms"),
        (999, "999ms"),
        (8_640, "8.64s"),
        (59_999, "59.999s"),
        (360_000, "6m0s"),
        (61_500, "1m1.5s"),
        (3_600_000, "1h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(ms: int, said: str) -> None:
    assert duration(ms) == said


@pytest.mark.parametrize("anthropic", [True, False])
def test_all_of_them_are_described_as_they_are(anthropic: bool) -> None:
    for limits in ([REQUESTS, TOKENS, INPUT, OUTPUT], [REQUESTS, OUTPUT]):
        made = text(rate_headers(limits, anthropic=anthropic, now_s=NOW_S))
        described = rate_header_objects(anthropic=anthropic)
        assert set(made) <= set(described)
        for name, value in made.items():
            schema = described[name]["schema"]
            said = int(value) if schema["type"] == "integer" else value
            jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(said)
    assert set(
        text(rate_headers([REQUESTS, TOKENS, INPUT, OUTPUT], anthropic=anthropic, now_s=NOW_S))
    ) == set(described)


@pytest.mark.parametrize("ms", [0, 1, 999, 8_640, 59_999, 360_000, 61_500, 3_600_000])
def test_durations_are_as_described(ms: int) -> None:
    schema = rate_header_objects(anthropic=False)["x-ratelimit-reset-tokens"]["schema"]
    jsonschema_rs.Draft202012Validator(schema).validate(duration(ms))


BODY = {"model": "simulated", "prompt": "hello", "max_tokens": 2}
MESSAGE = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def limited() -> Stand:
    stand = Stand()
    limits = [ClassLimits(0, requests_per_minute=60)]
    stand.serving.tenants.put("acme", replace(stand.serving.tenants.named("acme"), limits=limits))
    return stand


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_tokens_that_overtake_what_admission_says_do_not_lose_it(path: str, stream: bool) -> None:
    stand = limited()
    body = BODY if path == "/v1/completions" else {"model": "simulated", "input": "hello"}
    call = stand.call(path=path, body={**body, "stream": stream})
    request = await stand.request()
    stand.tokens(request, 0, [72, 73], "length")
    stand.complete(request, 2)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not call.sent
    said = Dispatched(request.request_id, 1, EPOCH, 0, WORKER_EPOCH, "fallback", rate_limits=[REQUESTS])
    stand.tell(said)
    await call.finish()
    assert call.headers[b"x-ratelimit-remaining-requests"] == b"59"
    assert call.headers[b"x-headrace-model"] == b"fallback"
    assert b'"model":"fallback"' in call.content


async def test_what_admission_never_says_holds_no_answer_up() -> None:
    stand = limited()
    call = stand.call(path="/v1/completions", body={**BODY, "stream": True})
    request = await stand.request()
    stand.tokens(request, 0, [72, 73], "length")
    stand.complete(request, 2)
    assert b"[DONE]" in (await call.finish()).content


@pytest.mark.parametrize(("priority", "waits"), [("interactive", False), ("free", True)])
async def test_nobody_waits_for_what_cannot_be_said(priority: str, waits: bool) -> None:
    stand = Stand()
    call = stand.call(body={**BODY, "priority": priority, "stream": True})
    stand.tokens(await stand.request(), 0, [72])
    for _ in range(9):
        await asyncio.sleep(0)
    assert bool(call.sent) is not waits
    call.disconnect()
    await call.finish()


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        ("/v1/completions", BODY, b"x-ratelimit-remaining-requests"),
        ("/v1/completions", {**BODY, "stream": True}, b"x-ratelimit-remaining-requests"),
        ("/v1/responses", {"model": "simulated", "input": "hi"}, b"x-ratelimit-remaining-requests"),
        ("/v1/messages", MESSAGE, b"anthropic-ratelimit-requests-remaining"),
    ],
)
async def test_answers_and_refusals_carry_them(path: str, body: dict[str, Any], header: bytes) -> None:
    stand = Stand()
    call = stand.call(path=path, body=body)
    request = await stand.request()
    run = (0, WORKER_EPOCH, request.model)
    stand.tell(Dispatched(request.request_id, 1, EPOCH, *run, rate_limits=[REQUESTS]))
    stand.tokens(request, 0, [72, 73], "length")
    stand.complete(request, 2)
    assert (await call.finish()).headers[header] == b"59"
    call = stand.call(path=path, body=body)
    refused = (await stand.request()).request_id
    stand.tell(
        Rejected(refused, 1, 429, "request_rate_exceeded", "no", 100, [RateLimit("requests", 60, 0, 9)])
    )
    assert (await call.finish()).status == 429
    assert call.headers[header] == b"0"


async def test_one_that_waited_tells_what_was_left_when_it_was_let_in() -> None:
    stand = Stand()
    call = stand.call(path="/v1/completions", body=BODY)
    request = await stand.request()
    stand.tell(Admitted(request.request_id, 1, EPOCH, 0, 7, [TOKENS]))
    stand.dispatched(request)
    stand.complete(request, 0)
    assert (await call.finish()).headers[b"x-ratelimit-remaining-tokens"] == b"8200"
