"""Idempotency-Key over the whole stack: one request runs, whichever gateway or admission is asked."""

import httpx

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
    # Whoever decides next knows it too.
    running.stack.kill("admission-0")
    running.call(running.stack.restart("admission-0"))
    assert text_of(events(ask(running, "gateway-1"))) == text_of(whole)
    rows = "SELECT tenant, output_tokens FROM usage_final ORDER BY tenant"
    eventually(lambda: running.sql(rows) == [["acme", str(TOKENS)], ["other", "2"]])
