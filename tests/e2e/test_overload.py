"""Two models on two workers: what a tenant is told of its limits, and who serves when one of them is full."""

import dataclasses
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from infra.cli import app
from schemas.catalog import simulated_model
from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from tests.e2e.conftest import ADMIN_KEY, RunningStack, running_stack, simulated_config
from tests.e2e.test_streams import eventually

BIG, SMALL, LATE = "big", "small", "late"
FREE_MAX_TOKENS = 7
SETTINGS = {
    "worker-0": {"HEADRACE_MODEL": BIG, "HEADRACE_MAX_NUM_SEQS": "1"},
    "worker-1": {"HEADRACE_MODEL": SMALL},
    "gateway": {"HEADRACE_ADMIN_KEY": ADMIN_KEY},
    # Whoever waits goes elsewhere if it can; who has waited 0.1 s caps class free, and nobody is refused.
    "admission": {
        "HEADRACE_FALLBACK_WAIT_MS": "1",
        "HEADRACE_SHED_WAIT_MS": "50,100,500000,600000",
        "HEADRACE_SHED_FREE_MAX_TOKENS": str(FREE_MAX_TOKENS),
    },
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("two-models")
    for name, fallbacks in ((BIG, [SMALL]), (SMALL, []), (LATE, [])):
        spec = dataclasses.replace(simulated_model(), id=name, fallback_models=fallbacks)
        (folder / name).mkdir()
        (folder / name / "model.json").write_text(json.dumps(dataclasses.asdict(spec)))
    config = simulated_config(
        folder / "data",
        models_dir=folder,
        models=(BIG, SMALL),
        workers=2,
        settings=SETTINGS,
        step_ms=20.0,  # so that no first token overtakes what admission says, and headers tell it
    )
    with running_stack(config) as stack:
        yield stack


@contextmanager
def open_stream(client: httpx.Client, **body: Any) -> Iterator[httpx.Response]:
    """A stream that has begun, of 2,000 tokens if nobody ends it before."""
    asked = {"prompt": "hi", "max_tokens": 2_000, "stream": True, **body}
    with client.stream("POST", "/v1/generate", json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer


def seconds(told: str) -> float:
    """A duration of 1 to 60 s as OpenAI's API writes it: 8.64s."""
    found = re.fullmatch(r"([\d.]+)s", told)
    assert found is not None, told
    return float(found[1])


def test_a_tenants_cap_on_max_tokens_is_its_default(running: RunningStack) -> None:
    limits = [ClassLimits(c, max_tokens=5) for c in PriorityClass]
    with running.client(running.tenant("capped", limits=limits)) as client:
        asked = {"model": SMALL, "prompt": "hi"}
        answer = client.post("/v1/generate", json=asked).json()
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("length", 5)
        assert client.post("/v1/generate", json={**asked, "max_tokens": 5}).status_code == 200
        refused = client.post("/v1/generate", json={**asked, "max_tokens": 6})
        assert refused.status_code == 400
        assert {key: refused.json()["error"][key] for key in ("param", "code")} == {
            "param": "max_tokens",
            "code": "max_tokens_too_large",
        }


def test_what_is_left_falls_with_what_runs_and_comes_back(running: RunningStack) -> None:
    limits = [ClassLimits(c, tokens_per_minute=6_000, requests_per_minute=600) for c in PriorityClass]

    def left(answer: httpx.Response) -> tuple[int, int, str]:
        """Tokens, requests, and how long until all tokens are back."""
        assert answer.status_code == 200
        told = {name.removeprefix("x-ratelimit-"): value for name, value in answer.headers.items()}
        assert (told["limit-tokens"], told["limit-requests"]) == ("6000", "600")
        return int(told["remaining-tokens"]), int(told["remaining-requests"]), told["reset-tokens"]

    with running.client(running.tenant("limited", limits=limits)) as client:
        with open_stream(client, model=SMALL) as first, open_stream(client, model=SMALL) as second:
            before, after = left(first), left(second)
        # Each reserves its prompt and 2,000; 100 a second are coming back.
        assert before[0] < 4_000
        assert after[0] < before[0] - 1_000
        assert after[1] < before[1] < 600
        assert 10 < seconds(before[2]) < seconds(after[2]) - 10
        asked = {"model": SMALL, "prompt": "hi", "max_tokens": 1}
        # Both clients are gone: what they did not use is there long before it would have come back.
        eventually(lambda: left(client.post("/v1/generate", json=asked))[0] > 4_500)


def test_interactive_takes_the_only_place_from_class_free_which_goes_on(running: RunningStack) -> None:
    def figure(name: str) -> float:
        return running.metric("worker-0", name)

    preempted = figure("vllm:num_preemptions_total")
    with running.client() as client, open_stream(client, model=BIG, priority="free") as free:
        positions = (int(line.removeprefix("id: ")) for line in free.iter_lines() if line.startswith("id: "))
        next(positions)  # it has the place, for 40 s
        asked = {"model": BIG, "prompt": "hi", "max_tokens": 3, "allow_fallback": False}
        answer = client.post("/v1/generate", json=asked)
        assert (answer.status_code, answer.json()["model"]) == (200, BIG)
        eventually(lambda: figure("vllm:num_preemptions_total") > preempted)
        eventually(lambda: figure("vllm:num_requests_running") == 1 > figure("vllm:num_requests_waiting"))
        assert any(position >= 60 for position in positions)


def test_a_full_model_hands_over_to_its_fallback_and_cuts_class_free(running: RunningStack) -> None:
    key = running.tenant("crowd")
    with running.client(key) as client, ThreadPoolExecutor(2) as pool:

        def ask(path: str = "/v1/generate", **body: Any) -> httpx.Response:
            answer = client.post(path, json={"model": BIG, "max_tokens": 3, **body})
            assert answer.status_code == 200, answer.text
            return answer

        def shed_level() -> float:
            return running.metric("admission-0", "headrace_admission_shed_level")

        with open_stream(client, model=BIG) as begun:
            assert begun.headers["x-headrace-model"] == BIG
            waiting = pool.submit(ask, prompt="wait", allow_fallback=False)
            eventually(lambda: shed_level() == 2)
            free = pool.submit(ask, prompt="free", allow_fallback=False, priority="free", max_tokens=2_000)
            whole = ask(prompt="hand over")
            chat = ask("/v1/chat/completions", messages=[{"role": "user", "content": "hand over"}])
            with open_stream(client, model=BIG, prompt="hand over", max_tokens=4) as streamed:
                streamed.read()
            for answer in (whole, chat, streamed):
                assert answer.headers["x-headrace-model"] == SMALL
            assert [answer.json()["model"] for answer in (whole, chat)] == [SMALL, SMALL]
            assert not waiting.done()  # it would not have been handed over
        answer = waiting.result()
        assert (answer.json()["model"], answer.headers["x-headrace-model"]) == (BIG, BIG)
        answer = free.result()
        assert answer.headers["x-headrace-max-tokens"] == str(FREE_MAX_TOKENS)
        assert answer.json()["usage"]["output_tokens"] == FREE_MAX_TOKENS
        assert answer.json()["stop_reason"] == "length"
    query = "SELECT model, class, output_tokens FROM usage_final WHERE tenant = 'crowd'"
    eventually(lambda: len(running.sql(query)) == 6)
    rows = sorted(running.sql(query))
    assert [row for row in rows if row[0] == SMALL] == [
        [SMALL, "interactive", "3"],
        [SMALL, "interactive", "3"],
        [SMALL, "interactive", "4"],
    ]
    assert [BIG, "free", str(FREE_MAX_TOKENS)] in rows
    assert [BIG, "interactive", "3"] in rows
    assert running.metric("admission-0", "headrace_admission_fallbacks") == 3


def test_a_model_is_offered_and_taken_back_while_all_run(running: RunningStack) -> None:
    """By a gateway and by admission, within two seconds. It has no worker of its own."""
    told = {
        "HEADRACE_KAFKA": running.stack.bootstrap_servers,
        "HEADRACE_MODELS_DIR": str(running.stack.config.models_dir),
    }

    def headrace(*command: str) -> Result:
        return CliRunner().invoke(app, ["model", *command], env=told)

    with running.client() as client:

        def ask() -> httpx.Response:
            return client.post("/v1/generate", json={"model": LATE, "prompt": "hi", "max_tokens": 2})

        def models() -> set[str]:
            return {model["id"] for model in client.get("/v1/models").json()["data"]}

        assert ask().status_code == 404
        assert headrace("add", LATE, "--fallback", SMALL).exit_code == 0
        eventually(lambda: models() == {BIG, SMALL, LATE}, within_s=2.0)
        answer = ask()
        assert (answer.status_code, answer.headers["x-headrace-model"]) == (200, SMALL)
        assert SMALL in headrace("list").stdout
        assert headrace("remove", LATE).exit_code == 0
        eventually(lambda: models() == {BIG, SMALL}, within_s=2.0)
        assert ask().status_code == 404
        # What was answered can still be read.
        read = client.get(f"/v1/streams/{answer.headers['x-headrace-stream']}")
        assert '"output_tokens":2' in read.text
    for command, message in (
        (("add", "nothing"), "no model 'nothing' in"),
        (("add", BIG, "--fallback", BIG), "names the model itself"),
        (("remove", BIG), "model big was not added"),
    ):
        refused = headrace(*command)
        assert refused.exit_code == 1
        assert message in refused.stderr


def test_the_same_over_http(running: RunningStack) -> None:
    url = f"/admin/v1/models/{LATE}"
    with running.client(ADMIN_KEY) as admin, running.client() as client:

        def error(answer: httpx.Response) -> tuple[int, str]:
            return answer.status_code, answer.json()["error"]["code"]

        put = admin.put(url, json={"fallback_models": [SMALL]})
        assert put.status_code == 200, put.text
        assert admin.get("/admin/v1/models").json()["data"] == [put.json()]
        eventually(lambda: client.get(f"/v1/models/{LATE}").status_code == 200, within_s=2.0)
        again = admin.put(url, headers={"If-Match": put.headers["etag"]})
        assert again.json()["fallback_models"] == []
        stale = admin.delete(url, headers={"If-Match": put.headers["etag"]})
        assert error(stale) == (412, "version_conflict")
        assert admin.delete(url).json() == {"object": "model", "id": LATE, "deleted": True}
        eventually(lambda: client.get(f"/v1/models/{LATE}").status_code == 404, within_s=2.0)
        assert error(admin.delete(url)) == (404, "model_not_found")
        assert error(admin.put("/admin/v1/models/nothing")) == (404, "model_not_found")
        itself = admin.put(url, json={"fallback_models": [LATE]})
        assert (itself.status_code, itself.json()["error"]["param"]) == (400, "fallback_models")
        assert error(client.put(url)) == (401, "invalid_admin_key")
