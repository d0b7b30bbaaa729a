"""A burst that sheds load on a real broker: its records, and another policy over them."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.codec import encode
from schemas.records import Dispatched, InferenceRequest, Rejected, Shedding, Usage
from tests.admission_harness import LAYOUT, AdmissionProcess, Fleet, fleet, make_request, make_tenant, worker
from tests.own_broker import own_broker

POLICY = """
from infra.replay.policy import ShippedPolicy

class Nobody(ShippedPolicy):
    def admit(self, tenant, model, seen):
        from streams.admission.refusal import Refusal
        return Refusal(429, "closed", "no") if tenant == "demo" and seen.attempt == 1 else None

def make_policy():
    return Nobody()
"""


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


async def headrace_replay(bootstrap: str, *options: str) -> dict[str, Any]:
    """The JSON line of the command."""
    environment = {**os.environ, "HEADRACE_KAFKA": bootstrap, "HEADRACE_SHARDS": str(LAYOUT.shards)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infra.cli", "replay", "--from", "10m", *options),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


async def end(client: Fleet, request: InferenceRequest, epoch: int) -> None:
    """The worker's usage row."""
    row = Usage(
        request.request_id,
        1,
        False,
        request.tenant,
        request.priority,
        request.model,
        10,
        4,
        8,
        "stop",
        request.accepted_at,
        request.accepted_at + 50,
        0,
        epoch,
        first_token_ms=30,
    )
    partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
    await client.producer.send_and_wait(topics.USAGE, encode(row), partition=partition)


async def test_recorded_traffic_is_decided_again(bootstrap: str, tmp_path: Path) -> None:
    process = AdmissionProcess(bootstrap, tmp_path, HEADRACE_SHED_WAIT_MS="50,100,150,200")
    try:
        process.wait_ready()
        async with fleet(bootstrap) as client:
            await client.put_tenant(make_tenant())
            async with worker(client, 0, max_num_seqs=2) as (epoch, status):
                running = [make_request() for _ in range(2)]
                for request in running:
                    await client.send(request)
                    await client.answer(request, Dispatched)
                status.num_running, status.mailbox_offsets = 2, [2, 0, 0]
                waiting = make_request(priority=1, max_tokens=4_000)
                await client.send(waiting)

                def levels() -> list[int]:
                    return [s.value.level for s in client.seen if isinstance(s.value, Shedding)]

                # Nobody is served: one level after the other, each told to the fleet.
                await client.wait_for(lambda: 4 in levels())
                assert levels() == [1, 2, 3, 4]
                shed = make_request(priority=1)
                await client.send(shed)
                refused = await client.answer(shed, Rejected)
                assert (refused.status, refused.code) == (429, "free_class_shed")
                for request in running:
                    await end(client, request, epoch)
                status.num_running = 0
                await client.answer(waiting, Dispatched)
                await end(client, waiting, epoch)
        assert process.stop() == 0  # and its decisions are in the log
    finally:
        process.kill()
    same = await headrace_replay(bootstrap)
    assert same["requests"] == 4
    assert same["recorded"] == same["replayed"]
    assert same["recorded"]["refused"] == {"free free_class_shed": 1}
    assert (same["real_ttft_ms"].keys(), same["real_hit_rate"]) == ({"p50", "p90", "p99"}, 0.4)
    path = tmp_path / "closed.py"
    path.write_text(POLICY)
    other = await headrace_replay(bootstrap, "--policy", str(path))
    assert other["replayed"]["let_in"] == 0
    assert other["newly_refused"] == {"interactive demo": 2, "free demo": 1}
    # The same on a fleet like the one that served, with the load that each policy makes.
    forward = await headrace_replay(bootstrap, "--closed-loop", "--policy", str(path))
    assert forward["requests"] == 4
    assert forward["recorded"]["refused"] == {"free free_class_shed": 1}
    assert forward["shipped"]["let_in"] == 4  # the worker is never as busy as a heartbeat by hand can say
    assert forward["policy"]["refused"] == {"free closed": 2, "interactive closed": 2}
