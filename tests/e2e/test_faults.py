"""Processes of a whole stack die or stand still under load: no token is lost, doubled or billed wrongly.

What is measured is for `infra/bench failover`; here only what has to hold on any machine is looked at.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from infra.benchmarks import faults
from infra.benchmarks.faults import Fault, Load, inflict
from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from tests.e2e.conftest import RunningStack, running_stack, simulated_config

TOKENS_PER_MINUTE = 12_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two gateways and two workers."""
    # Time enough for gateways to restate on a machine that is busy.
    settings = {"admission": {"HEADRACE_RESTATE_WAIT_MS": "5000"}}
    data_dir = tmp_path_factory.mktemp("pair")
    config = simulated_config(data_dir, gateways=2, workers=2, step_ms=10.0, settings=settings)
    with running_stack(config) as running:
        yield running


def suffer(pair: RunningStack, fault: Fault, load: Load, *to_restart: str) -> dict[str, Any]:
    figures = pair.call(inflict(pair.stack, pair.api_key, fault, load))
    for process in to_restart:
        pair.call(pair.stack.restart(process))
    return figures


@pytest.mark.parametrize("fault", [faults.worker_process, faults.worker_host])
def test_streams_outlive_their_worker(pair: RunningStack, fault: Fault) -> None:
    figures = suffer(pair, fault, Load(16, 300), "worker-0")
    assert 0 < figures["affected"] < 16
    assert figures["retries"] >= figures["affected"]
    assert figures["claims"] == 0


def test_a_worker_that_drains_finishes_what_it_runs(pair: RunningStack) -> None:
    assert suffer(pair, faults.worker_drain, Load(16, 200), "worker-0")["retries"] == 0


def test_a_stalled_broker_is_nobodys_fault(pair: RunningStack) -> None:
    figures = suffer(pair, faults.broker_stalled, Load(64, 300))
    assert (figures["retries"], figures["claims"]) == (0, 0)
    assert figures["gap_ms_max"] > 2_500


def test_clients_of_a_killed_gateway_go_on_at_another(pair: RunningStack) -> None:
    figures = suffer(pair, faults.gateway_killed, Load(48, 300), "gateway-0")
    assert figures["affected"] == 48
    assert figures["retries"] == 0


def test_clients_of_a_gateway_that_drains_go_on_at_another(pair: RunningStack) -> None:
    # A local gateway has 5 s to drain: these take longer.
    figures = suffer(pair, faults.gateway_drain, Load(8, 800), "gateway-0")
    assert figures["affected"] == 8
    assert figures["retries"] == 0


def test_streams_outlive_their_gateway_and_worker_together(pair: RunningStack) -> None:
    figures = suffer(pair, faults.gateway_and_worker, Load(16, 300), "gateway-0", "worker-0")
    assert figures["affected"] == 16
    assert 0 < figures["retries"] < 32


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_limits_hold_over_a_kill_of_admission_with_long_requests_running(pair: RunningStack) -> None:
    limits = [
        ClassLimits(c, tokens_per_minute=TOKENS_PER_MINUTE, max_concurrent_requests=2) for c in PriorityClass
    ]
    key = pair.tenant("held", limits=limits)
    body = {"model": pair.model, "prompt": "hello", "max_tokens": 4_000, "ignore_eos": True}
    with pair.client(key) as client, ExitStack() as streams:
        running = []
        for _ in range(2):
            stream = client.stream("POST", "/v1/generate", json={**body, "stream": True})
            answer = streams.enter_context(stream)
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            running.append((answer, lines))
        before = time.monotonic()
        refused = client.post("/v1/generate", json=body)
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert remaining(refused) < TOKENS_PER_MINUTE // 2  # most is reserved

        killed = time.monotonic()
        pair.call(_kill(pair))
        pair.call(pair.stack.restart("admission-0"))
        again = client.post("/v1/generate", json=body)
        after = time.monotonic()
        print(f"admission was killed and refused again after {after - killed:.2f} s")
        assert again.json()["error"]["code"] == "concurrency_limit_exceeded"
        # No more is left than the refill has given meanwhile.
        assert remaining(again) <= remaining(refused) + (after - before) * TOKENS_PER_MINUTE / 60 + 1

        for _, lines in running:
            next(lines)  # they go on
        running[0][0].close()
        small = {**body, "max_tokens": 5}
        answers = [client.post("/v1/generate", json=small)]
        while answers[-1].status_code == 429 and len(answers) < 100:  # until the cancel's usage row is there
            time.sleep(0.1)
            answers.append(client.post("/v1/generate", json=small))
        assert answers[-1].status_code == 200
    assert pair.metric("admission-0", "headrace_admission_takeover_seconds_count") > 0


async def _kill(pair: RunningStack) -> None:
    pair.stack.kill("admission-0")
