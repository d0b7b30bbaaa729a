"""Clients that leave in each phase of a request: nothing runs on, and only what was generated is billed."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import MakeStack, RunningStack
from tests.e2e.test_streams import eventually

PROMPT_TOKENS = 16_000


@contextmanager
def asking(
    running: RunningStack, key: str, prompt: str = "hi", max_tokens: int = 15_000
) -> Iterator[Iterator[str]]:
    """The lines of a stream; its connection is closed behind."""
    body = {"model": running.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    with running.client(key) as client, client.stream("POST", "/v1/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


def give_up_waiting(running: RunningStack, key: str) -> None:
    """No answer begins, and the client closes."""
    body = {"model": running.model, "prompt": "hi", "max_tokens": 5, "stream": True}
    with running.client(key) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/generate", json=body, timeout=0.5)


def read(lines: Iterator[str], num_tokens: int) -> None:
    for _ in range(num_tokens):
        while "token" not in next(lines):
            pass


def is_empty(running: RunningStack) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    left = [running.metric("worker-0", name) for name in names]
    return sum(left) + running.metric("gateway-0", "headrace_gateway_open_requests") == 0


def row(running: RunningStack, tenant: str) -> list[str]:
    """The only one it has: input and output tokens, finish reason."""

    def rows() -> list[list[str]]:
        columns = "input_tokens, output_tokens, finish_reason"
        return running.sql(f"SELECT {columns} FROM usage_final WHERE tenant = '{tenant}'")

    eventually(lambda: len(rows()) == 1)
    return rows()[0]


def test_a_disconnect_in_each_phase(make_stack: MakeStack) -> None:
    # One place in the batch, and prompts in many steps.
    worker = {"HEADRACE_MAX_NUM_SEQS": "1", "HEADRACE_MAX_PREFILL_CHUNK": "16"}
    gateway = {"HEADRACE_CANCEL_TIMEOUT_MS": "2000"}
    running = make_stack(step_ms=5.0, settings={"worker": worker, "gateway": gateway})
    phases = ("before-admission", "queued", "prefill", "decode", "after-the-last-token")
    keys = {phase: running.tenant(phase) for phase in phases}
    with asking(running, keys["decode"]) as lines:
        read(lines, 5)
        give_up_waiting(running, keys["queued"])
        eventually(lambda: running.metric("gateway-0", "headrace_gateway_open_requests") == 1)
        read(lines, 5)
    assert row(running, "queued") == ["0", "0", "cancelled"]
    eventually(lambda: is_empty(running))
    prompt, output, reason = row(running, "decode")
    assert (prompt, reason) == ("3", "cancelled")
    assert 10 <= int(output) < 15_000
    with asking(running, keys["prefill"], "a" * (PROMPT_TOKENS - 1)):
        pass  # the answer begins when the worker has it
    eventually(lambda: is_empty(running))
    assert row(running, "prefill") == [str(PROMPT_TOKENS), "0", "cancelled"]
    with asking(running, keys["after-the-last-token"], max_tokens=5) as lines:
        read(lines, 5)
    eventually(lambda: is_empty(running))
    assert row(running, "after-the-last-token") == ["3", "5", "length"]
    running.stack.kill("admission-0")
    give_up_waiting(running, keys["before-admission"])
    running.call(running.stack.restart("admission-0"))
    assert row(running, "before-admission") == ["0", "0", "cancelled"]
    eventually(lambda: is_empty(running))
