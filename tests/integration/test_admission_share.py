"""Three admission processes, one worker: its room is shared, and what one leaves at its death is served."""

import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from schemas import topics
from schemas.codec import encode
from schemas.records import Dispatch, Dispatched, InferenceRequest, Rejected, Usage, WorkerStatus
from tests.admission_harness import LAYOUT, AdmissionProcess, Fleet, fleet, make_request, make_tenant, worker
from tests.integration.test_admission_processes import NO_SESSION_ENDS, TAKEOVER_TIMEOUT_S, gateway, holders
from tests.integration.test_admission_processes import bootstrap as bootstrap

PROCESSES = 3
START_TIMEOUT_S = 90.0
SEATS = 8
REQUESTS = 30  # of each tenant


def tenant_of(partition: int) -> str:
    """One whose interactive requests lie in that partition."""
    names = (f"tenant-{n}" for n in range(1_000))
    return next(name for name in names if topics.tenant_partition(name, 0, LAYOUT.shards) == partition)


TENANTS = {partition: tenant_of(partition) for partition in (0, topics.NUM_CLASSES)}


@pytest.fixture
def processes(bootstrap: str, tmp_path: Path) -> Iterator[list[AdmissionProcess]]:
    started = [AdmissionProcess(bootstrap, tmp_path, slot, **NO_SESSION_ENDS) for slot in range(PROCESSES)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


class Seats:
    """The worker's side: what it was given runs until it is ended. Doubles are ignored, as workers do."""

    def __init__(self, client: Fleet, epoch: int, status: WorkerStatus) -> None:
        self.client, self.epoch, self.status = client, epoch, status
        self.dispatches: list[InferenceRequest] = []
        self.ended: set[bytes] = set()
        self._looked = 0

    def look(self) -> None:
        """Takes what lies in the mailbox, and says so in the next heartbeat."""
        for seen in self.client.seen[self._looked :]:
            if isinstance(seen.value, Dispatch):
                assert seen.value.epoch == self.epoch
                self.dispatches.append(seen.value.request)
                self.status.mailbox_offsets[seen.partition % topics.NUM_CLASSES] = seen.offset + 1
        self._looked = len(self.client.seen)
        self.status.num_running = len(self.running())

    def running(self) -> dict[bytes, InferenceRequest]:
        return {r.request_id: r for r in self.dispatches if r.request_id not in self.ended}

    async def end(self, count: int) -> None:
        for request in list(self.running().values())[:count]:
            self.ended.add(request.request_id)
            at = request.accepted_at
            row = Usage(
                request.request_id, 1, False, request.tenant, 0, request.model, 10, 0, 16, "stop", at, at
            )
            row.slot, row.epoch = 0, self.epoch
            partition = topics.tenant_partition(request.tenant, 0, LAYOUT.shards)
            await self.client.producer.send_and_wait(topics.USAGE, encode(row), partition=partition)
        self.status.num_running = len(self.running())


@asynccontextmanager
async def seats(client: Fleet) -> AsyncIterator[Seats]:
    async with worker(client, 0, max_num_seqs=SEATS, num_running=SEATS) as (epoch, status):
        yield Seats(client, epoch, status)


async def test_room_is_shared_and_nothing_is_lost_or_run_twice_when_a_process_dies(
    bootstrap: str, processes: list[AdmissionProcess]
) -> None:
    async with fleet(bootstrap) as client, gateway(client), seats(client) as worker_0:
        for name in TENANTS.values():
            await client.put_tenant(make_tenant(name))
        await client.wait_for(
            lambda: len({slot for _, slot in holders(client).values()}) == PROCESSES, START_TIMEOUT_S
        )
        await client.read_for(1.0)  # their owner has restated

        # 1. The worker is full, so both tenants' requests wait, each where its partition is held.
        requests = [make_request(tenant=name) for name in TENANTS.values() for _ in range(REQUESTS)]
        for request in requests:
            await client.send(request)
        await client.wait_for(lambda: sum(queued(client).values()) > 0)
        await client.read_for(0.5)
        assert client.answers(requests[0], Dispatched) == []

        # 2. All its seats become free: they are shared, and not taken by each.
        worker_0.status.num_running = 0
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            await client.read_for(0.05)
            worker_0.look()
        by_tenant = Counter(request.tenant for request in worker_0.dispatches)
        assert SEATS <= by_tenant.total() <= SEATS + PROCESSES - 1
        assert set(by_tenant) == set(TENANTS.values())

        # 3. The holder of a busy partition dies without a word.
        partition = next(iter(TENANTS))
        _, slot = holders(client)[partition]
        told = {r.request_id for r in requests if client.answers(r, Dispatched)}
        os.kill(processes[slot].process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await client.wait_for(lambda: holders(client)[partition][1] != slot, TAKEOVER_TIMEOUT_S)
        print(f"\nanother process holds the partition after {time.monotonic() - killed_at:.1f} s")
        await client.read_for(1.0)

        # 4. Its owner sends again what was not answered; all of it is served.
        for request in requests:
            if not client.answers(request, Dispatched):
                await client.send(request)
        served_by = time.monotonic() + START_TIMEOUT_S
        while any(not client.answers(request, Dispatched) for request in requests):
            assert time.monotonic() < served_by
            await client.read_for(0.1)
            worker_0.look()
            assert len(worker_0.running()) <= SEATS + PROCESSES - 1
            await worker_0.end(SEATS)
        assert not [r for r in requests if client.answers(r, Rejected)]

        # 5. What its owner had heard of was never dispatched again.
        given = Counter(request.request_id for request in worker_0.dispatches)
        assert set(given) == {request.request_id for request in requests}
        assert [given[request_id] for request_id in told] == [1] * len(told)


def queued(client: Fleet) -> dict[int, int]:
    """Tokens that wait, by partition."""
    return {p: sum(q.tokens for q in status.queued) for p, (status, _) in holders(client).items()}
