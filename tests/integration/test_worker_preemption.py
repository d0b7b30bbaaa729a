"""A preemption is told: a record on fleet.decisions, a log line, a figure; and costs no token."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas import topics
from schemas.records import Preemption
from tests.worker_harness import LAYOUT, WorkerProcess, fleet_client, make_inference_request
from workers.simulated_runner import SimulatedRunner


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    """One sequence at a time."""
    broker = Broker(tmp_path / "broker")
    try:
        asyncio.run(broker.start())
        asyncio.run(create_topics(broker.bootstrap_servers, LAYOUT))
        settings = {
            "HEADRACE_STEP_MS": "3",
            "HEADRACE_MAX_NUM_SEQS": "1",
            "HEADRACE_SWAP_MEMORY_MIB": "0",
            "HEADRACE_CANARY_S": "0",  # it takes the place of a lower class as well
        }
        worker = WorkerProcess(broker.bootstrap_servers, 0, tmp_path, settings)
        try:
            worker.wait_ready()
            yield worker
            assert worker.stop() == 0
        finally:
            worker.process.kill()
        asyncio.run(broker.stop())
    finally:
        broker.kill()


async def test_a_preemption_is_a_record_a_line_and_a_figure(worker: WorkerProcess) -> None:
    async with fleet_client(worker.bootstrap) as client:
        epoch = await client.epoch(0)
        low = make_inference_request(priority=2, max_tokens=300)
        await client.dispatch(0, epoch, low)
        await client.wait_for(lambda: client.tokens(low))
        high = make_inference_request(priority=0, max_tokens=20)
        await client.dispatch(0, epoch, high)
        await client.end(high)
        assert not client.state(low).ended
        await client.end(low)
        runner = SimulatedRunner(vocab_size=127, first_token_id=32)
        for request in (low, high):
            count = request.sampling.max_tokens
            assert client.tokens(request) == [runner.token_at(request.request_id, p) for p in range(count)]

        (seen,) = await client.wait_for(
            lambda: [seen for seen in client.seen if isinstance(seen.value, Preemption)]
        )
        assert seen.partition == topics.tenant_partition("acme", 2, LAYOUT.shards)
        lost = seen.value.tokens_lost
        assert lost > len(low.prompt_token_ids)
        assert seen.value == Preemption(
            request_id=low.request_id,
            attempt=1,
            tenant="acme",
            priority=2,
            model="simulated",
            slot=0,
            epoch=epoch,
            reason="higher_class_seqs",
            mode="recompute",
            tokens_lost=lost,
            for_request_id=high.request_id,
        )
    lines = [json.loads(line) for line in worker.log_file.read_text().splitlines()]
    (line,) = [line for line in lines if line["message"] == "preempted"]
    assert (line["request_id"], line["for_request_id"]) == (low.request_id.hex(), high.request_id.hex())
    assert (line["reason"], line["mode"], line["tokens_lost"]) == ("higher_class_seqs", "recompute", lost)
    _, metrics = worker.get("/metrics")
    labels = 'mode="recompute",model_name="simulated",reason="higher_class_seqs"'
    assert f"headrace_preemptions_total{{{labels}}} 1.0" in metrics
    assert 'vllm:num_preemptions_total{model_name="simulated"} 1.0' in metrics
