"""A stream that its client comes back to, over the whole stack with two gateways."""

import json
from typing import Any

import httpx

from tests.e2e.conftest import MakeStack, RunningStack
from tests.e2e.test_streams import eventually

TOKENS = 240
BODY = {"prompt": "hi", "max_tokens": TOKENS, "stream": True}


def at(running: RunningStack, gateway: str, api_key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key or running.api_key}"}
    return httpx.Client(base_url=running.stack.url(gateway), headers=headers, timeout=60.0)


def events(answer: httpx.Response) -> list[tuple[int, dict[str, Any]]]:
    assert answer.status_code == 200, answer.read()
    found = []
    for event in answer.text.split("\n\n")[:-1]:
        event_id, data = event.split("\n")
        found.append((int(event_id.removeprefix("id: ")), json.loads(data.removeprefix("data: "))))
    return found


def text_of(found: list[tuple[int, dict[str, Any]]]) -> str:
    return "".join(data["text"] for _, data in found if data["type"] == "token")


def read_half(running: RunningStack, detach_s: int) -> tuple[str, str, int]:
    """(id of the stream, text so far, id of the last event), and the connection is gone."""
    text = ""
    with (
        at(running, "gateway-0") as client,
        client.stream(
            "POST",
            "/v1/generate",
            json={"model": running.model, **BODY},
            headers={"X-Headrace-Detach": str(detach_s)},
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        position = -1
        for line in answer.iter_lines():
            if line.startswith("id: "):
                position = int(line.removeprefix("id: "))
            elif line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["text"]
                if position >= TOKENS // 2:
                    return answer.headers["x-headrace-stream"], text, position
    raise AssertionError("the stream ended early")


def test_a_client_that_comes_back_gets_exactly_the_rest(make_stack: MakeStack) -> None:
    running = make_stack(gateways=2, step_ms=15.0)
    stream, first_half, position = read_half(running, detach_s=10)
    path, behind = f"/v1/streams/{stream}", {"Last-Event-ID": str(position)}
    others_key = running.tenant("other")
    with at(running, "gateway-1") as client, at(running, "gateway-1", others_key) as other:
        assert other.get(path).status_code == 404
        assert other.delete(path).status_code == 404
        rest = events(client.get(path, headers=behind))  # while it runs, until it ends
        assert position < rest[0][0] <= TOKENS - 1
        assert rest[-1] == (
            TOKENS - 1,
            {
                "type": "done",
                "usage": {"input_tokens": 3, "cached_tokens": 0, "output_tokens": TOKENS},
                "stop_reason": "length",
            },
        )
    for gateway in ("gateway-0", "gateway-1"):
        with at(running, gateway) as client:
            undisturbed = text_of(events(client.get(path)))
            assert first_half + text_of(rest) == undisturbed
            assert text_of(events(client.get(path, headers=behind))) == text_of(rest)
            by_query = client.get(path, params={"starting_after": position})
            assert text_of(events(by_query)) == text_of(rest)
    with at(running, "gateway-1", others_key) as other:
        assert other.get(path).status_code == 404
    rows = "SELECT output_tokens, finish_reason FROM usage_final"
    eventually(lambda: running.sql(rows) == [[str(TOKENS), "length"]])
    # The ids are as good as the log: both outlive a restart.
    running.stop()
    running.start()
    with at(running, "gateway-1") as client:
        assert text_of(events(client.get(path))) == undisturbed


def test_a_deleted_stream_frees_its_blocks_and_costs_what_was_generated(make_stack: MakeStack) -> None:
    running = make_stack(gateways=2, step_ms=15.0)
    stream, _, position = read_half(running, detach_s=60)
    with at(running, "gateway-1") as client:
        assert client.delete(f"/v1/streams/{stream}").status_code == 202
        eventually(lambda: running.metric("worker-0", "vllm:num_requests_running") == 0)
        eventually(lambda: running.metric("worker-0", "vllm:kv_cache_usage_perc") == 0)
        last_id, last = events(client.get(f"/v1/streams/{stream}"))[-1]
    assert last["stop_reason"] == "cancelled"
    assert position <= last_id < TOKENS - 1
    rows = "SELECT output_tokens, finish_reason FROM usage_final"
    eventually(lambda: running.sql(rows) == [[str(last_id + 1), "cancelled"]])
