"""Idempotency-Key over the whole stack: one request runs, whichever gateway or admission is asked."""

from collections.abc import Callable

import httpx

from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from tests.e2e.conftest import MakeStack, RunningStack
from tests.e2e.test_stream_resume import at, events, text_of
from tests.e2e.test_streams import eventually

TOKENS = 200
KEY = {"Idempotency-Key": "order 66"}
BODY = {"model": "simulated", "prompt": "hi", "max_tokens": TOKENS, "stream": True}


def ask(running: RunningStack, gateway: str, **changes: object) -> httpx.Response:
    with at(running, gateway) as client:
        return client.post("/v1/generate", json={**BODY, **changes}, headers=KEY)


def test_one_runs_and_all_get_its_answer(make_stack: MakeStack) -> None:
    running = make_stack(gateways=2, step_ms=15.0)
    with (
        at(running, "gateway-0") as client,
        client.stream("POST", "/v1/generate", json=BODY, headers=KEY) as first,
    ):
        assert first.status_code == 200, first.read()
        lines = first.iter_lines()
        begun = [next(lines) for _ in range(60)]
    # Its connection is gone, and the request runs on: who asks again gets all of it.
    again = ask(running, "gateway-1")
    assert again.headers["x-headrace-stream"] == first.headers["x-headrace-stream"]
    whole = events(again)
    assert whole[-1][1]["usage"]["output_tokens"] == TOKENS
    assert again.text.startswith("\n".join(begun[:57]))
    assert events(ask(running, "gateway-0")) == whole  # it has ended
    refused = ask(running, "gateway-0", max_tokens=TOKENS + 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    other_tenant = running.tenant("other")
    with at(running, "gateway-0", other_tenant) as client:
        theirs = events(client.post("/v1/generate", json={**BODY, "max_tokens": 2}, headers=KEY))
    assert theirs[-1][1]["usage"]["output_tokens"] == 2
    choices = refuse_one_choice(running)
    served = choices()
    # Whoever decides next knows it too.
    running.stack.kill("admission-0")
    running.call(running.stack.restart("admission-0"))
    assert text_of(events(ask(running, "gateway-1"))) == text_of(whole)
    again = choices()
    assert (again.status_code, again.json()) == (200, served.json())
    rows = "SELECT tenant, sum(output_tokens) FROM usage_final GROUP BY tenant ORDER BY tenant"
    eventually(lambda: running.sql(rows)[::2] == [["acme", str(TOKENS)], ["other", "2"]])
    # Three that were let in beside one that was refused, the two that were served, and what ran alone.
    rows_of = "SELECT output_tokens FROM usage_final WHERE tenant = 'choosy' ORDER BY output_tokens"
    eventually(lambda: running.sql(rows_of)[:-1] == [["0"], ["0"], ["0"], ["5"], ["5"]])


def refuse_one_choice(running: RunningStack) -> Callable[[], httpx.Response]:
    """Two choices where there is room for one: nothing is left of them. What asks with their key again."""
    limits = [ClassLimits(c, max_concurrent_requests=2) for c in PriorityClass]
    key = running.tenant("choosy", limits=limits)
    body = {"model": "simulated", "prompt": "hi", "max_tokens": 5, "n": 2}

    def ask_for_two() -> httpx.Response:
        with at(running, "gateway-0", key) as client:
            return client.post("/v1/completions", json=body, headers=KEY)

    def open_requests() -> float:
        return running.metric("gateway-0", "headrace_gateway_open_requests")

    with (
        at(running, "gateway-0", key) as client,
        client.stream("POST", "/v1/generate", json={**BODY, "max_tokens": 5_000}) as alone,
    ):
        assert alone.status_code == 200
        for _ in range(2):
            refused = ask_for_two()
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "concurrency_limit_exceeded",
            )
            eventually(lambda: open_requests() == 1)
        refused = ask_for_two()
        # Whoever decides next has read of neither.
        running.stack.kill("admission-0")
        assert refused.status_code == 429
        running.call(running.stack.restart("admission-0"))
    eventually(lambda: open_requests() == 0)
    return ask_for_two
