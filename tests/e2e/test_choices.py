"""Several choices to one body over the whole stack: all or none, a row of the bill for each."""

from typing import Any

import httpx

from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from tests.e2e.conftest import RunningStack
from tests.e2e.test_streams import eventually

PATH = "/v1/completions"


def body_for(running: RunningStack, **changes: Any) -> dict[str, Any]:
    return {"model": running.model, "prompt": "hi", "max_tokens": 4, "ignore_eos": True, **changes}


def is_idle(running: RunningStack) -> bool:
    waiting = running.metric("gateway-0", "headrace_gateway_open_requests")
    return waiting + running.metric("worker-0", "vllm:num_requests_running") == 0


def test_all_choices_are_served_or_none(simulated_stack: RunningStack) -> None:
    limits = [ClassLimits(c, max_concurrent_requests=2) for c in PriorityClass]
    key = simulated_stack.tenant("choosy", limits=limits)
    with simulated_stack.client(key) as client:

        def ask(**changes: Any) -> httpx.Response:
            return client.post(PATH, json=body_for(simulated_stack, **changes))

        for stream in (False, True):
            refused = ask(n=3, max_tokens=5000, stream=stream)
            assert refused.status_code == 429, refused.text
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            # Those that were let in are stopped: there is room for two again.
            eventually(lambda: is_idle(simulated_stack))
        served = ask(prompt=["hi", "you"], seed=3).json()
    assert [choice["index"] for choice in served["choices"]] == [0, 1]
    assert served["usage"] == {
        "prompt_tokens": 3 + 4,
        "completion_tokens": 8,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    # What was stopped because another choice was refused costs nothing.
    rows = "SELECT sum(input_tokens), sum(output_tokens), countIf(output_tokens > 0) FROM usage_final"
    eventually(lambda: simulated_stack.sql(f"{rows} WHERE tenant = 'choosy'") == [["7", "8", "2"]])


def test_choices_share_the_prompt_that_one_of_them_computes(simulated_stack: RunningStack) -> None:
    with simulated_stack.client() as client:
        body = body_for(simulated_stack, prompt="To be shared. " * 40, n=3, seed=1)
        usage = client.post(PATH, json=body).json()["usage"]
    assert usage["prompt_tokens"] == 3 * 561
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 560


def test_a_client_that_leaves_stops_all_choices(simulated_stack: RunningStack) -> None:
    body = body_for(simulated_stack, n=4, max_tokens=20_000, stream=True)
    with (
        simulated_stack.client() as client,
        client.stream("POST", PATH, json=body) as answer,
    ):
        seen = {line.split('"index":')[1][0] for line in _lines(answer, 40)}
        assert seen == set("0123")
        assert len(answer.headers["x-headrace-stream"].split(", ")) == 4
    eventually(lambda: is_idle(simulated_stack))


def _lines(answer: httpx.Response, count: int) -> list[str]:
    lines = (line for line in answer.iter_lines() if line.startswith("data: "))
    return [next(lines) for _ in range(count)]
