"""What a request was given comes back, once, however it ends: told by a limit of requests at once."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.records import Admitted, Dispatched, InferenceRequest, Rejected, WorkerStatus
from tests.admission_harness import AdmissionProcess, Fleet, fleet, limits, make_request, make_tenant, worker
from tests.integration.test_admission_processes import AT_ONCE, Owner, gateway, holders
from tests.integration.test_admission_processes import bootstrap as bootstrap


@pytest.fixture
def admission(bootstrap: str, tmp_path: Path) -> Iterator[AdmissionProcess]:
    process = AdmissionProcess(bootstrap, tmp_path, HEADRACE_RESTATE_WAIT_MS="10000")
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


def room_for_all(client: Fleet) -> AbstractAsyncContextManager[tuple[int, WorkerStatus]]:
    """A worker with more seats than requests are dispatched here: it does not say what it has taken in."""
    return worker(client, 0, max_num_seqs=64)


async def is_at_its_limit(owner: Owner, free: int = 0) -> None:
    """There is room for so many requests more, and for no other."""
    asked = [await owner.ask() for _ in range(free + 1)]
    assert asked == [True] * free + [False]
    assert len(owner.running) == AT_ONCE


async def ended(client: Fleet) -> None:
    """Admission has read the row by then."""
    await client.read_for(0.5)


async def test_nothing_leaks_by_a_cancel_a_refusal_a_resend_a_retry_a_crash_or_a_takeover(
    bootstrap: str, admission: AdmissionProcess, tmp_path: Path
) -> None:
    async with fleet(bootstrap) as client, gateway(client) as owner, room_for_all(client) as (epoch, status):
        await client.put_tenant(make_tenant(limits=limits(max_concurrent_requests=AT_ONCE)))
        await client.read_for(0.5)

        # 1. A refusal took nothing, and gives nothing back.
        await is_at_its_limit(owner, free=AT_ONCE)
        await owner.end(0, epoch)
        await ended(client)
        await is_at_its_limit(owner, free=1)

        # 2. Cancelled while it waits, twice.
        await owner.end(0, epoch)
        status.num_running = status.max_num_seqs
        await client.read_for(0.5)
        waits = make_request()
        await client.send(waits)
        await client.answer(waits, Admitted)
        await client.cancel(waits)
        await client.cancel(waits)
        assert (await client.answer(waits, Rejected)).code == "cancelled"
        status.num_running = 0
        await client.read_for(0.5)
        await is_at_its_limit(owner, free=1)

        # 3. Sent again while it runs: it is told again, and is one request.
        await tell_again(client, next(iter(owner.running.values())))
        await is_at_its_limit(owner)

        # 4. Retried: it is still one request, and it ends once, though two attempts have a row.
        first = next(iter(owner.running.values()))
        assert await owner.ask(replace(first, attempt=2, output_token_ids=[1, 2]))
        await is_at_its_limit(owner)
        await owner.send_row(first, 0, epoch)
        await owner.end(0, epoch)
        await ended(client)
        await is_at_its_limit(owner, free=1)

        # 5. Its worker died and nothing was left to try: the owner's row ends it.
        await owner.end(None, None)
        await ended(client)
        await is_at_its_limit(owner, free=1)

        # 6. Admission dies. What ran counts with its next life, and what ended since does not.
        before = {partition: status.takeover_offset for partition, (status, _) in holders(client).items()}
        admission.kill()
        await owner.end(0, epoch)
        successor = AdmissionProcess(bootstrap, tmp_path, HEADRACE_RESTATE_WAIT_MS="10000")
        try:
            successor.wait_ready()
            taken = {partition: status.takeover_offset for partition, (status, _) in holders(client).items()}
            assert all(offset >= before[partition] for partition, offset in taken.items())
            await is_at_its_limit(owner, free=1)
            while owner.running:
                await owner.end(0, epoch)
            await ended(client)
            await is_at_its_limit(owner, free=AT_ONCE)
        finally:
            successor.kill()


async def tell_again(client: Fleet, request: InferenceRequest) -> None:
    told = len(client.answers(request, Dispatched))
    await client.send(request)
    await client.wait_for(lambda: len(client.answers(request, Dispatched)) > told)
