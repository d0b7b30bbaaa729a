"""Processes of a whole stack die or stand still under load: no token is lost, doubled or billed wrongly.

What is measured is for `infra/bench failover`; here only what has to hold on any machine is looked at.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from infra.benchmarks import faults
from infra.benchmarks.faults import Fault, Load, inflict
from tests.e2e.conftest import TENANT, RunningStack, simulated_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two gateways and two workers."""
    running = RunningStack(
        simulated_config(tmp_path_factory.mktemp("pair"), gateways=2, workers=2, step_ms=10.0)
    )
    try:
        running.start()
        running.api_key = running.tenant(TENANT)
        yield running
    finally:
        running.close()


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
