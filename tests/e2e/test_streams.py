"""Streams over the whole stack: equal tokens in company, disconnects, lost workers."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.conftest import MakeStack, RunningStack
from workers.simulated_runner import SimulatedRunner


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def stream(running: RunningStack, api_key: str | None = None, **body: Any) -> list[dict[str, Any]]:
    with (
        running.client(api_key) as client,
        client.stream(
            "POST", "/v1/generate", json={"model": running.model, "stream": True, **body}
        ) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        return list(events(answer))


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in found if event["type"] == "token")


def eventually(what: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_stream_ends_with_its_usage_and_equals_the_whole_answer(gemma_stack: RunningStack) -> None:
    body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 10, "temperature": 0}
    found = stream(gemma_stack, **body)
    whole = gemma_stack.generate(**body).json()
    assert found[-1]["type"] == "done"
    assert {key: found[-1][key] for key in ("usage", "stop_reason")} == {
        "usage": {"input_tokens": 6, "cached_tokens": 0, "output_tokens": 10},
        "stop_reason": "length",
    }
    assert text_of(found) == whole["text"]
    assert "France" in whole["text"]
    assert whole["usage"] == found[-1]["usage"]


def test_ten_parallel_streams_give_the_same_tokens_as_one_by_one(gemma_stack: RunningStack) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"{n}. " + "The weather in the mountains is " * (1 + n % 4),
            "max_tokens": 6 + n,
            "temperature": 0 if n % 2 else 1.0,
            "seed": n,
            "ignore_eos": True,
        }
        for n in range(10)
    ]
    alone = [stream(gemma_stack, **body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: stream(gemma_stack, **body), bodies))
    assert [text_of(found) for found in together] == [text_of(found) for found in alone]
    counts = [
        [(found[-1]["usage"]["input_tokens"], found[-1]["usage"]["output_tokens"]) for found in streams]
        for streams in (together, alone)  # how much of a prompt was cached depends on who came before
    ]
    assert counts[0] == counts[1]


def test_a_disconnect_frees_the_blocks_and_bills_what_was_generated(simulated_stack: RunningStack) -> None:
    key = simulated_stack.tenant("disconnects")
    body = {"model": simulated_stack.model, "prompt": "hi", "max_tokens": 20_000, "stream": True}
    with (
        simulated_stack.client(key) as client,
        client.stream("POST", "/v1/generate", json=body) as answer,
    ):
        found = events(answer)
        for _ in range(20):
            next(found)
        assert simulated_stack.metric("worker-0", "vllm:kv_cache_usage_perc") > 0
    eventually(lambda: simulated_stack.metric("worker-0", "vllm:num_requests_running") == 0)
    eventually(lambda: simulated_stack.metric("worker-0", "vllm:kv_cache_usage_perc") == 0)

    def rows() -> list[list[str]]:
        return simulated_stack.sql(
            "SELECT output_tokens, finish_reason, input_tokens FROM usage_final WHERE tenant = 'disconnects'"
        )

    eventually(lambda: len(rows()) == 1)
    output_tokens, finish_reason, input_tokens = rows()[0]
    assert 20 <= int(output_tokens) < 20_000
    assert (finish_reason, input_tokens) == ("cancelled", "3")


def test_streams_outlive_their_worker(make_stack: MakeStack) -> None:
    running = make_stack()
    body = {"model": running.model, "prompt": "hi", "max_tokens": 5_000, "stream": True}
    with running.client() as client, client.stream("POST", "/v1/generate", json=body) as answer:
        found = events(answer)
        seen = [next(found) for _ in range(20)]
        running.stack.kill("worker-0")  # and its parent: nobody says Left, its silence has to tell
        running.call(running.stack.restart("worker-0"))
        seen += list(found)
        request_id = bytes.fromhex(answer.headers["x-request-id"])
    assert seen[-1]["type"] == "done", seen[-1]
    assert seen[-1]["usage"]["output_tokens"] == 5_000
    # Neither a token more nor one less, and each the one of its place.
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)  # printable bytes, as workers have it
    assert text_of(seen) == "".join(chr(runner.token_at(request_id, i)) for i in range(5_000))
    eventually(lambda: running.sql("SELECT output_tokens, input_tokens FROM usage_final") == [["5000", "3"]])


def test_a_drained_worker_ends_what_it_can_and_hands_on_the_rest(make_stack: MakeStack) -> None:
    running = make_stack()
    with ThreadPoolExecutor(2) as pool:
        lengths = (500, 5_000)  # at 2 ms a step, one ends within the 8 s of a drain
        streams = [pool.submit(stream, running, prompt="hi", max_tokens=n) for n in lengths]
        eventually(lambda: running.metric("worker-0", "vllm:num_requests_running") == 2)
        running.call(running.stack.restart("worker-0"))
        for length, found in zip(lengths, (future.result() for future in streams), strict=True):
            assert found[-1]["type"] == "done", found[-1]
            assert found[-1]["usage"]["output_tokens"] == len(text_of(found)) == length
    rows = "SELECT output_tokens, input_tokens, attempt FROM usage_final ORDER BY output_tokens"
    eventually(lambda: running.sql(rows) == [["500", "3", "1"], ["5000", "3", "2"]])


def test_a_restarted_stack_keeps_tenants_and_the_bill(make_stack: MakeStack) -> None:
    running = make_stack()
    for _ in range(3):
        assert running.generate(prompt="hi", max_tokens=4).status_code == 200
    bill = "SELECT tenant, count(), sum(input_tokens), sum(output_tokens) FROM usage_final GROUP BY tenant"
    eventually(lambda: running.sql(bill) == [["acme", "3", "9", "12"]])
    running.stop()
    running.start()
    assert running.sql(bill) == [["acme", "3", "9", "12"]]
    assert running.generate(prompt="hi", max_tokens=4).status_code == 200
    eventually(lambda: running.sql(bill) == [["acme", "4", "12", "16"]])


def test_a_killed_ledger_loses_and_doubles_no_row(make_stack: MakeStack) -> None:
    running = make_stack()
    for _ in range(5):
        running.generate(prompt="hi", max_tokens=2)
    running.stack.kill("ledger-0")
    for _ in range(5):
        assert running.generate(prompt="hi", max_tokens=2).status_code == 200
    running.call(running.stack.restart("ledger-0"))
    eventually(lambda: running.sql("SELECT count(), sum(output_tokens) FROM usage_final") == [["10", "20"]])


def test_a_killed_admission_is_back_and_serves(make_stack: MakeStack) -> None:
    running = make_stack()
    assert running.generate(prompt="hi", max_tokens=2).status_code == 200
    running.stack.kill("admission-0")
    with ThreadPoolExecutor(1) as pool:
        # Sent while nobody admits: the owner sends it again when the partition has been taken over.
        waiting = pool.submit(running.generate, prompt="hi", max_tokens=2)
        time.sleep(0.5)
        running.call(running.stack.restart("admission-0"))
        assert waiting.result().status_code == 200
