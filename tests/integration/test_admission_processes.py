"""Five admission processes on a real broker, one of which dies while a tenant is at its limits."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from schemas import topics
from schemas.codec import encode
from schemas.fleet import join
from schemas.records import (
    Dispatched,
    Heartbeat,
    InferenceRequest,
    PartitionStatus,
    Rejected,
    Restate,
    RestatedRequest,
    Usage,
)
from tests.admission_harness import (
    LAYOUT,
    AdmissionProcess,
    Fleet,
    fleet,
    limits,
    make_request,
    make_tenant,
    worker,
)
from tests.own_broker import own_broker

PROCESSES = 5
START_TIMEOUT_S = 90.0
RESEND_S = 2.0
QUIET_S = 3.0
AT_ONCE = 3
# What one that died held moves because the others put it out of their group, or it does not move in time.
NO_SESSION_ENDS = {"HEADRACE_SESSION_TIMEOUT_MS": "80000"}
TAKEOVER_TIMEOUT_S = 40.0
PARTITION = topics.tenant_partition("demo", 0, LAYOUT.shards)


class Owner:
    """A gateway that only heartbeats and restates: of every takeover it says what it has running."""

    def __init__(self, client: Fleet, epoch: int, nonce: bytes) -> None:
        self.client = client
        self.epoch = epoch
        self.nonce = nonce
        self.running: dict[bytes, InferenceRequest] = {}
        self.answered: dict[int, int] = {}

    async def beat(self) -> None:
        while True:
            beat = Heartbeat("gateway", 0, self.epoch, self.nonce)
            await self.client.producer.send(topics.HEARTBEATS, encode(beat), partition=0)
            await asyncio.sleep(0.1)

    async def answer_takeovers(self) -> None:
        while True:
            for partition, offset in self.takeovers().items():
                if offset > self.answered.get(partition, -1):
                    self.answered[partition] = offset
                    await self.restate(partition, offset)
            await asyncio.sleep(0.02)

    def takeovers(self) -> dict[int, int]:
        return {partition: status.takeover_offset for partition, (status, _) in holders(self.client).items()}

    async def restate(self, partition: int, offset: int) -> None:
        told = [
            RestatedRequest(r.request_id, r.attempt, r.tenant, r.priority, 10, 16, 0, r.end_ms)
            for r in self.running.values()
            if partition == PARTITION
        ]
        record = Restate("gateway", 0, self.epoch, offset, told)
        await self.client.producer.send_and_wait(topics.REQUESTS, encode(record), partition=partition)

    async def ask(self, request: InferenceRequest | None = None) -> bool:
        """Whether one more request was let in."""
        request = request or make_request()
        answer = None
        while answer is None:  # sent again, as owners do, for who took the partition over meanwhile
            await self.client.send(request)
            with suppress(TimeoutError):
                found = await self.client.wait_for(
                    lambda: self.client.answers(request, Dispatched | Rejected), RESEND_S
                )
                answer = found[0]
        if isinstance(answer, Rejected):
            assert answer.code == "concurrency_limit_exceeded", answer
            return False
        self.running[request.request_id] = request
        return True

    async def end(self, slot: int | None, epoch: int | None) -> None:
        """The oldest of its requests ends. Without a run: by its owner's word."""
        request = self.running.pop(next(iter(self.running)))
        await self.send_row(request, slot, epoch)

    async def send_row(self, request: InferenceRequest, slot: int | None, epoch: int | None) -> None:
        at, sealed = request.accepted_at, slot is None
        row = Usage(
            request.request_id,
            request.attempt,
            sealed,
            "demo",
            0,
            request.model,
            10,
            0,
            16,
            "stop",
            at,
            at + 1,
        )
        row.slot, row.epoch = slot, epoch
        await self.client.producer.send_and_wait(topics.USAGE, encode(row), partition=PARTITION)


def heard(client: Fleet) -> set[int]:
    """Slots of the admission processes that heartbeat."""
    beats = (seen.value for seen in client.seen if isinstance(seen.value, Heartbeat))
    return {beat.slot for beat in beats if beat.role == "admission"}


def holders(client: Fleet) -> dict[int, tuple[PartitionStatus, int]]:
    """By partition who took it over last, as far as is heard: (its status, its slot)."""
    found: dict[int, tuple[PartitionStatus, int]] = {}
    for seen in client.seen:
        if isinstance(seen.value, Heartbeat) and seen.value.role == "admission":
            for status in seen.value.partitions:
                known = found.get(status.partition)
                if known is None or status.takeover_offset >= known[0].takeover_offset:
                    found[status.partition] = status, seen.value.slot
    return found


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[str]:
    with own_broker(tmp_path / "broker", LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def processes(bootstrap: str, tmp_path: Path) -> Iterator[list[AdmissionProcess]]:
    # Time enough for the owner on a machine that is busy: what is looked at is not how fast it is.
    settings = {"HEADRACE_RESTATE_WAIT_MS": "10000", **NO_SESSION_ENDS}
    started = [AdmissionProcess(bootstrap, tmp_path, slot, **settings) for slot in range(PROCESSES)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


@asynccontextmanager
async def gateway(client: Fleet) -> AsyncIterator[Owner]:
    owner = Owner(client, *await join(client.producer, "gateway", 0))
    tasks = [asyncio.create_task(work) for work in (owner.beat(), owner.answer_takeovers())]
    try:
        yield owner
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_tenant_at_its_concurrency_limit_stays_there_while_processes_come_and_go(
    bootstrap: str, processes: list[AdmissionProcess]
) -> None:
    async with fleet(bootstrap) as client, gateway(client) as owner, worker(client, 0) as (epoch, _):
        await client.put_tenant(make_tenant(limits=limits(max_concurrent_requests=AT_ONCE)))
        # 1. All five are there and have shared the partitions out; one may have none.
        await client.wait_for(lambda: len(heard(client)) == PROCESSES, START_TIMEOUT_S)
        shared: dict[int, int] = {}
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(shared) < LAYOUT.shards * topics.NUM_CLASSES or shared != owner.takeovers():
                shared = owner.takeovers()
                await client.read_for(QUIET_S)
        assert [await owner.ask() for _ in range(AT_ONCE + 2)] == [True] * AT_ONCE + [False] * 2

        # 2. Who holds the tenant's partition dies; another takes it over.
        status, slot = holders(client)[PARTITION]
        os.kill(processes[slot].process.pid, signal.SIGKILL)
        await client.wait_for(lambda: holders(client)[PARTITION][1] != slot, TAKEOVER_TIMEOUT_S)
        assert holders(client)[PARTITION][0].takeover_offset >= status.takeover_offset
        assert [await owner.ask() for _ in range(2)] == [False] * 2

        # 3. One ends: one place is free, and no more.
        await owner.end(0, epoch)
        await client.read_for(0.5)
        assert [await owner.ask() for _ in range(2)] == [True, False]
        assert len(owner.running) == AT_ONCE
