"""A worker whose runner breaks must not go on: it ends loudly, and says nothing that is not so."""

import asyncio
from pathlib import Path

import pytest

from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas.records import Completion, Usage
from tests.worker_harness import LAYOUT, fleet_client, make_inference_request
from workers import worker
from workers.batch import RunnerOutput, SchedulerOutput
from workers.config import WorkerConfig
from workers.runners import LoadedEngine, load_engine
from workers.simulated_runner import SimulatedRunner


class BreakingRunner(SimulatedRunner):
    """Lets the worker's own requests pass, which are no attempts of anybody's."""

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        if any(s.request.attempt and len(s.request.output_token_ids) == 3 for s in batch.scheduled):
            raise RuntimeError("the device is lost")
        return super().execute(batch)


def load_breaking_engine(config: WorkerConfig, on_rank_died: object) -> LoadedEngine:
    loaded = load_engine(config)
    loaded.engine.runner = BreakingRunner(vocab_size=127, first_token_id=32)
    return loaded


async def test_an_error_in_a_step_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "load_engine", load_breaking_engine)
    broker = Broker(tmp_path)
    await broker.start()
    try:
        await create_topics(broker.bootstrap_servers, LAYOUT)
        config = WorkerConfig(
            kafka=broker.bootstrap_servers,
            shards=LAYOUT.shards,
            worker_slots=LAYOUT.worker_slots,
            gateway_slots=LAYOUT.gateway_slots,
            models_dir=tmp_path,
            runner="simulated",
        )
        joined: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        run = asyncio.create_task(worker.Worker(config, joined.set_result, asyncio.Event()).run())
        epoch = await asyncio.wait_for(joined, 30)
        async with fleet_client(broker.bootstrap_servers) as client:
            request = make_inference_request(max_tokens=10)
            await client.dispatch(0, epoch, request)
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(run, 10)
            assert caught.group_contains(RuntimeError, match="the device is lost")
            await client.read_for(0.5)
            assert len(client.tokens(request)) <= 3
            assert client.values(Completion) == client.values(Usage) == []
    finally:
        await broker.stop()
