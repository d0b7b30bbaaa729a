"""A worker whose engine computes wrong, or no longer moves, says so on the real broker and leaves."""

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.local.broker import Broker
from schemas.records import Completion, Heartbeat, InferenceRequest, Left, Tokens, Usage
from tests import broken_worker
from tests.own_broker import own_broker
from tests.worker_harness import LAYOUT, FleetClient, fleet_client, make_inference_request
from workers.config import load_config
from workers.exit_status import ExitStatus
from workers.parent import supervise

CHILD = ["-m", "tests.broken_worker", "--child"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[FleetClient]:
    async with fleet_client(broker.bootstrap_servers) as client:
        yield client


@dataclass
class BrokenWorker:
    slot: int
    client: FleetClient
    parent: "asyncio.Task[int]"
    release: Path

    def heartbeats(self) -> list[Heartbeat]:
        return [h for h in self.client.values(Heartbeat) if h.role == "worker" and h.slot == self.slot]

    def canaries(self) -> list[str]:
        """What the heartbeats said, without repetitions."""
        found: list[str] = []
        for heartbeat in self.heartbeats():
            assert heartbeat.worker is not None
            if found[-1:] != [heartbeat.worker.canary]:
                found.append(heartbeat.worker.canary)
        return found

    async def epoch(self) -> int:
        await self.client.wait_for(self.heartbeats)
        return self.heartbeats()[-1].epoch

    async def dispatch(self, first_token_id: int = 65, max_tokens: int = 4000) -> InferenceRequest:
        request = make_inference_request(max_tokens=max_tokens)
        request.prompt_token_ids = [first_token_id] * 8
        await self.client.dispatch(self.slot, await self.epoch(), request)
        return request

    async def ready(self) -> tuple[int, str]:
        return await asyncio.to_thread(_get, f"http://{self.heartbeats()[-1].address}/health/ready")


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


_slots = iter(range(LAYOUT.worker_slots))


@pytest.fixture
async def worker(
    broker: Broker,
    client: FleetClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[BrokenWorker]:
    """A worker under its parent, in a slot of its own; parametrize indirectly with settings."""
    slot = next(_slots)
    settings = {
        "HEADRACE_KAFKA": broker.bootstrap_servers,
        "HEADRACE_SLOT": str(slot),
        "HEADRACE_SHARDS": str(LAYOUT.shards),
        "HEADRACE_WORKER_SLOTS": str(LAYOUT.worker_slots),
        "HEADRACE_GATEWAY_SLOTS": str(LAYOUT.gateway_slots),
        "HEADRACE_MODELS_DIR": str(tmp_path),
        "HEADRACE_RUNNER": "simulated",
        "HEADRACE_CANARY_S": "0.3",
        broken_worker.RELEASE: str(tmp_path / "release"),
        **getattr(request, "param", {}),
    }
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    parent = asyncio.create_task(supervise(load_config(os.environ), CHILD))
    try:
        yield BrokenWorker(slot, client, parent, tmp_path / "release")
    finally:
        parent.cancel()
        await asyncio.gather(parent, return_exceptions=True)


@pytest.mark.parametrize("worker", [{"HEADRACE_STEP_MS": "2"}], indirect=True)
async def test_a_canary_is_told_in_heartbeats_alone(worker: BrokenWorker, client: FleetClient) -> None:
    request = await worker.dispatch(max_tokens=400)
    await client.end(request)
    await client.read_for(0.5)
    assert worker.canaries() == ["ok"]
    assert await worker.ready() == (200, "ok")
    chunks = [chunk for tokens in client.values(Tokens) for chunk in tokens.chunks]
    assert {chunk.request_id for chunk in chunks} == {request.request_id}
    assert [usage.request_id for usage in client.values(Usage)] == [request.request_id]
    address = worker.heartbeats()[-1].address
    _, metrics = await asyncio.to_thread(_get, f"http://{address}/metrics")
    assert 'vllm:generation_tokens_total{model_name="simulated"} 400.0' in metrics
    assert 'vllm:request_success_total{finished_reason="length",model_name="simulated"} 1.0' in metrics


@pytest.mark.parametrize("worker", [{"HEADRACE_STEP_MS": "5"}], indirect=True)
async def test_a_worker_that_computes_wrong_says_nothing_more_and_leaves(
    worker: BrokenWorker, client: FleetClient
) -> None:
    running = await worker.dispatch()
    await client.wait_for(lambda: client.tokens(running))
    epoch = await worker.epoch()
    await worker.dispatch(broken_worker.WRONG)
    await client.wait_for(lambda: client.values(Left))
    assert await asyncio.wait_for(worker.parent, 10) == ExitStatus.CANARY_FAILED
    await client.read_for(0.3)
    assert worker.canaries() == ["ok", "failed"]
    assert client.values(Left) == [Left("worker", worker.slot, epoch, "canary_failed")]
    # Broker time: nothing of this run lies behind the first heartbeat that says it.
    failed_at = min(
        seen.timestamp
        for seen in client.seen
        if isinstance(seen.value, Heartbeat) and seen.value.worker and seen.value.worker.canary == "failed"
    )
    told = [seen for seen in client.seen if isinstance(seen.value, Tokens | Usage | Completion)]
    assert max(seen.timestamp for seen in told) <= failed_at
    assert not client.state(running).ended


@pytest.mark.parametrize("worker", [{broken_worker.WRONG_FROM_THE_START: "1"}], indirect=True)
async def test_a_worker_with_wrong_weights_never_joins(worker: BrokenWorker, client: FleetClient) -> None:
    assert await asyncio.wait_for(worker.parent, 30) == ExitStatus.CANARY_FAILED
    await client.read_for(0.3)
    assert client.seen == []


@pytest.mark.parametrize("worker", [{"HEADRACE_STALL_S": "0.5"}], indirect=True)
async def test_a_step_that_gets_over_it_shows_as_stalled_only_meanwhile(
    worker: BrokenWorker, client: FleetClient
) -> None:
    request = await worker.dispatch(broken_worker.STUCK, max_tokens=5)
    await client.wait_for(lambda: worker.canaries()[-1:] == ["engine_stalled"])
    assert await worker.ready() == (503, "engine_stalled")
    worker.release.touch()
    await client.end(request)
    await client.wait_for(lambda: worker.canaries() == ["ok", "engine_stalled", "ok"])
    assert await worker.ready() == (200, "ok")
    assert len(client.tokens(request)) == 5


@pytest.mark.parametrize("worker", [{"HEADRACE_STALL_S": "0.4", "HEADRACE_STALL_EXIT_S": "1"}], indirect=True)
async def test_a_step_that_never_ends_ends_the_worker(worker: BrokenWorker, client: FleetClient) -> None:
    request = await worker.dispatch(broken_worker.STUCK)
    epoch = await worker.epoch()
    await client.wait_for(lambda: client.values(Left))
    assert await asyncio.wait_for(worker.parent, 10) == ExitStatus.ENGINE_STALLED
    assert client.values(Left) == [Left("worker", worker.slot, epoch, "engine_stalled")]
    assert worker.canaries() == ["ok", "engine_stalled"]
    assert not client.state(request).ended
