"""A worker dies under streams of many kinds: what they hold across the change goes on to the byte."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MakeStack, RunningStack
from tests.e2e.test_streams import eventually
from workers.simulated_runner import SimulatedRunner

TOKENS = 300
CHARACTERS = re.compile(r"(?:é|漢|🙂){100}")
STOP = "ST" * 60 + "OP"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}


class Reading:
    """A stream that a thread reads. `begun` is set with its first text."""

    def __init__(self, running: RunningStack, path: str, **body: Any) -> None:
        self.begun = threading.Event()
        self.request_id = b""
        self.events: list[dict[str, Any]] = []
        self._running, self._path = running, path
        self._body = {"model": running.model, "stream": True, "max_tokens": TOKENS, **body}

    def read(self) -> None:
        with (
            self._running.client() as client,
            client.stream("POST", self._path, json=self._body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            self.request_id = bytes.fromhex(answer.headers["x-request-id"])
            for data in _data(answer):
                self.events.append(data)
                self.begun.set()

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self.events if event["type"] == "token")

    @property
    def output_tokens(self) -> int:
        done = self.events[-1]
        assert done["type"] == "done", done
        return int(done["usage"]["output_tokens"])


def _data(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def simulated_text(request_id: bytes, count: int) -> str:
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)  # printable bytes, as workers have it
    return "".join(chr(runner.token_at(request_id, i)) for i in range(count))


def told(content: list[dict[str, Any]]) -> str:
    """The text that log probabilities were told of, each token once."""
    assert all(len(each["top_logprobs"]) == 1 for each in content)
    return bytes(byte for each in content for byte in each["bytes"]).decode()


@pytest.fixture
def one_worker(make_stack: MakeStack) -> RunningStack:
    return make_stack(step_ms=10.0)


def test_nothing_is_lost_doubled_or_cut_elsewhere(one_worker: RunningStack) -> None:
    running = one_worker
    plain = Reading(running, "/v1/generate", prompt="hi")
    # Each of these tokens is a byte: a character is cut by most of the places where a run can end.
    utf8 = Reading(running, "/v1/generate", prompt="hi", regex=CHARACTERS.pattern, max_tokens=1_000)
    # All but the first three tokens may be the stop string, so the worker that dies holds them back.
    cut = Reading(running, "/v1/generate", prompt="hi", regex="abc(ST){60}OP[a-z]{99}", stop=[STOP])
    chat = Reading(running, "/v1/chat/completions", **CHAT)
    streams = (plain, utf8, cut, chat)
    whole = {"model": running.model, "max_tokens": TOKENS, **CHAT}

    def ask_whole() -> dict[str, Any]:
        with running.client() as client:
            answer: dict[str, Any] = client.post("/v1/chat/completions", json=whole).json()
            return answer

    with ThreadPoolExecutor(len(streams) + 1) as pool:
        answered = pool.submit(ask_whole)
        reads = [pool.submit(stream.read) for stream in streams]
        assert all(stream.begun.wait(20) for stream in streams)
        eventually(lambda: len(plain.events) >= 60)
        running.stack.kill("worker-0")  # and its parent: its silence has to tell
        running.call(running.stack.restart("worker-0"))
        for read in reads:
            read.result()
        response = answered.result()
    assert plain.text == simulated_text(plain.request_id, TOKENS)
    assert plain.output_tokens == TOKENS
    assert CHARACTERS.fullmatch(utf8.text)
    assert utf8.output_tokens == len(utf8.text.encode()) + 1  # the end token
    assert (cut.text, cut.events[-1]["stop_reason"]) == ("abc", "stop")
    assert cut.output_tokens == len("abc" + STOP)
    assert not any(event.get("error") for event in chat.events)
    choices = [choice for event in chat.events for choice in event["choices"]]
    text = simulated_text(chat.request_id, TOKENS)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert told([each for c in choices if c["logprobs"] for each in c["logprobs"]["content"]]) == text
    (choice,) = response["choices"]
    assert told(choice["logprobs"]["content"]) == choice["message"]["content"]
    assert len(choice["message"]["content"]) == TOKENS
    counts = [plain.output_tokens, utf8.output_tokens, cut.output_tokens, TOKENS, TOKENS]
    check_bill(running, counts, lambda: running.sql("SELECT attempt, output_tokens FROM usage_final"))


def check_bill(running: RunningStack, counts: list[int], rows: Callable[[], list[list[str]]]) -> None:
    """All went on in a second attempt, and are billed as counted."""
    eventually(lambda: sorted(rows()) == sorted(["2", str(count)] for count in counts))
