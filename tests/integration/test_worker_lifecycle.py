"""How a worker starts, ends, is killed, is replaced, and rides out a stalled broker."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from infra.local.broker import Broker
from schemas.records import Drain, Heartbeat, Join, Left, Tokens
from tests.own_broker import own_broker
from tests.service_process import ROOT
from tests.worker_harness import (
    LAYOUT,
    FleetClient,
    WorkerProcess,
    fleet_client,
    make_inference_request,
)

Start = Callable[..., WorkerProcess]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[FleetClient]:
    async with fleet_client(broker.bootstrap_servers) as client:
        yield client


@pytest.fixture
def start(broker: Broker, tmp_path: Path) -> Iterator[Start]:
    """Starts workers and waits until they are ready; leaves none behind."""
    workers = []

    def start(slot: int, **settings: str) -> WorkerProcess:
        worker = WorkerProcess(
            broker.bootstrap_servers,
            slot,
            tmp_path,
            {"HEADRACE_" + name.upper(): value for name, value in settings.items()},
        )
        workers.append(worker)
        worker.wait_ready()
        return worker

    yield start
    for worker in workers:
        with contextlib.suppress(IndexError, FileNotFoundError, ProcessLookupError):
            os.kill(worker.child_pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.wait()


def left(client: FleetClient, slot: int) -> tuple[Left, int] | None:
    """The slot's Left and its broker time (ms)."""
    found = [
        (s.value, s.timestamp) for s in client.seen if isinstance(s.value, Left) and s.value.slot == slot
    ]
    return found[0] if found else None


async def test_kill_9_of_the_worker_is_told_at_once(client: FleetClient, start: Start) -> None:
    worker = start(1, step_ms="5")
    epoch = await client.epoch(1)
    request = make_inference_request(max_tokens=4000)
    await client.dispatch(1, epoch, request)
    await client.wait_for(lambda: client.tokens(request))
    killed_at = time.time() * 1000
    os.kill(worker.child_pid, signal.SIGKILL)
    record, told_at = await client.wait_for(lambda: left(client, 1))
    assert record == Left("worker", 1, epoch, "signal SIGKILL")
    print(f"Left lies in the log {told_at - killed_at:.0f} ms after the kill")
    assert told_at - killed_at < 500  # 100 ms on a machine that has nothing else to do
    assert await asyncio.to_thread(worker.process.wait, 10) == 128 + signal.SIGKILL


def test_kill_9_of_the_parent_takes_the_worker_along(start: Start) -> None:
    worker = start(1)
    child = worker.child_pid
    worker.process.kill()
    worker.process.wait()
    deadline = time.monotonic() + 5
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Not gone, and not a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_sigterm_ends_what_runs_and_takes_nothing_new(client: FleetClient, start: Start) -> None:
    worker = start(2, step_ms="5")
    epoch = await client.epoch(2)
    running = make_inference_request(max_tokens=200)
    await client.dispatch(2, epoch, running)
    await client.wait_for(lambda: client.tokens(running))
    worker.process.send_signal(signal.SIGTERM)
    await client.wait_for(lambda: Drain("worker", 2, epoch) in client.values(Drain))
    await client.wait_for(lambda: (h := client.heartbeat(2)) and h.worker and h.worker.draining)
    assert worker.get("/health/ready") == (503, "draining")
    await client.read_for(0.3)
    late = make_inference_request()
    await client.dispatch(2, epoch, late)
    completion, _ = await client.end(running)
    assert completion.value.finish_reason == "length"
    assert len(client.tokens(running)) == 200
    record, _ = await client.wait_for(lambda: left(client, 2))
    assert record == Left("worker", 2, epoch, "exit 0")
    assert await asyncio.to_thread(worker.process.wait, 10) == 0
    assert client.state(late).run is None


async def test_a_drain_has_an_end(client: FleetClient, start: Start) -> None:
    worker = start(2, step_ms="20", drain_s="1")
    epoch = await client.epoch(2)
    request = make_inference_request(max_tokens=4000)
    await client.dispatch(2, epoch, request)
    await client.wait_for(lambda: client.tokens(request))
    began = time.monotonic()
    assert await asyncio.to_thread(worker.stop) == 0
    assert time.monotonic() - began >= 1
    await client.wait_for(lambda: left(client, 2))
    assert client.state(request).end is None


async def test_a_higher_epoch_in_the_slot_ends_the_older_run(client: FleetClient, start: Start) -> None:
    older = start(3)
    first = await client.epoch(3)
    start(3)
    assert await asyncio.to_thread(older.process.wait, 10) == 3
    assert "superseded" in older.log_file.read_text()
    joined = [s.offset for s in client.seen if isinstance(s.value, Join) and s.value.slot == 3]
    await client.wait_for(lambda: (h := client.heartbeat(3)) and h.epoch > first)
    second = await client.epoch(3)
    assert joined in ([], [first], [first, second])
    request = make_inference_request()
    await client.dispatch(3, second, request)
    await client.end(request)


async def test_a_long_step_shows_signs_of_life(client: FleetClient, start: Start) -> None:
    start(4, step_ms="2400", canary_s="0")
    epoch = await client.epoch(4)
    # A step that begins within half a step of the one before, here the warm-up's, is shortened.
    await client.read_for(1.3)
    request = make_inference_request(max_tokens=1)
    await client.dispatch(4, epoch, request)
    await client.end(request)
    chunks = [c for t in client.values(Tokens) for c in t.chunks if c.request_id == request.request_id]
    empty = [c for c in chunks if not c.token_ids]
    assert len(empty) >= 1
    ages = [h.worker.step_age_ms for h in client.values(Heartbeat) if h.slot == 4]
    assert max(ages) > 1500
    assert client.state(request).ended


async def test_a_stalled_broker_costs_no_token(broker: Broker, client: FleetClient, start: Start) -> None:
    start(5, step_ms="2", outbox_records="40")
    epoch = await client.epoch(5)
    request = make_inference_request(max_tokens=1500)
    await client.dispatch(5, epoch, request)
    await client.wait_for(lambda: client.tokens(request))
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(2)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    completion, usage = await client.end(request)
    state = client.state(request)
    assert state.end == completion.value
    assert len(state.token_ids) == usage.value.output_tokens == 1500
    positions = [
        c.position for t in client.values(Tokens) for c in t.chunks if c.request_id == request.request_id
    ]
    assert len(positions) == len(set(positions))


def run_worker(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        env=clean | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_validate_reports_all_errors_at_once() -> None:
    env = {
        "HEADRACE_RUNNER": "magic",
        "HEADRACE_SLOT": "9",
        "HEADRACE_KAFKA": "127.0.0.1:1",
        "HEADRACE_MAX_NUM_SEQS": "0",
    }
    result = run_worker(env, "--validate")
    assert result.returncode == 2
    for part in ("HEADRACE_RUNNER must be torch or simulated", "HEADRACE_SLOT is 9", "max_num_seqs must be"):
        assert part in result.stderr
    result = run_worker(env | {"HEADRACE_STEPMS": "1"}, "--validate")
    assert "HEADRACE_STEPMS is not a setting; did you mean HEADRACE_STEP_MS?" in result.stderr


def test_validate_says_what_would_be_served() -> None:
    result = run_worker({"HEADRACE_KAFKA": "127.0.0.1:1", "HEADRACE_RUNNER": "simulated"}, "--validate")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "worker: slot 0 would serve simulated with the simulated runner\n"


def test_without_kafka_it_gives_up_and_says_why() -> None:
    env = {"HEADRACE_KAFKA": "127.0.0.1:1", "HEADRACE_RUNNER": "simulated", "HEADRACE_START_S": "1"}
    result = run_worker(env)
    assert result.returncode == 1
    assert "no answer from Kafka at 127.0.0.1:1 within 1 s" in result.stderr


def test_with_topics_of_another_size_it_gives_up_and_says_why(broker: Broker) -> None:
    env = {
        "HEADRACE_KAFKA": broker.bootstrap_servers,
        "HEADRACE_RUNNER": "simulated",
        "HEADRACE_SHARDS": str(LAYOUT.shards),
        "HEADRACE_WORKER_SLOTS": str(LAYOUT.worker_slots + 1),
        "HEADRACE_GATEWAY_SLOTS": str(LAYOUT.gateway_slots),
    }
    result = run_worker(env)
    assert result.returncode == 1
    assert "inference.prefill has 18 partitions, by the settings it should have 21" in result.stderr
