"""A client's trace context, told on at each hop through the topics of a whole stack."""

import httpx

from schemas import topics
from schemas.headers import TRACEPARENT
from tests.e2e.conftest import RunningStack
from tests.log_reader import LogReader

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HOPS = {
    (topics.REQUESTS, "InferenceRequest"),
    (topics.PREFILL, "Dispatch"),
    (topics.TOKENS, "Dispatched"),
    (topics.USAGE, "Usage"),
    (topics.TOKENS, "Completion"),
}


async def traces_of(running: RunningStack, traceparent: str) -> dict[tuple[str, str], bytes | None]:
    """What the records that are one request's alone say, by topic and kind."""
    stack = running.stack
    names = {name for name, _ in HOPS}
    headers = {"authorization": f"Bearer {running.api_key}", TRACEPARENT: traceparent}
    found: dict[tuple[str, str], bytes | None] = {}
    async with (
        LogReader.open(stack.bootstrap_servers, stack.config.layout, names) as log,
        httpx.AsyncClient(base_url=stack.url(), headers=headers, timeout=20) as client,
    ):
        body = {"model": running.model, "prompt": "hi", "max_tokens": 2}
        answer = await client.post("/v1/generate", json=body)
        request_id = bytes.fromhex(answer.headers["x-request-id"])

        def has_all() -> bool:
            for seen in log.seen:
                headers = dict(seen.headers)
                if headers.get("request_id") == request_id:
                    found[seen.topic, type(seen.value).__name__] = headers.get(TRACEPARENT)
            return found.keys() >= HOPS

        await log.wait_for(has_all)
    return found


def test_each_record_of_a_request_says_whose_trace_it_belongs_to(simulated_stack: RunningStack) -> None:
    told = simulated_stack.call(traces_of(simulated_stack, TRACE))
    assert told == dict.fromkeys(HOPS, TRACE.encode())
    # What is no trace context goes no further.
    assert simulated_stack.call(traces_of(simulated_stack, TRACE[:-1])) == dict.fromkeys(HOPS)
