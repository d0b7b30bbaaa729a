"""One admission process against a real broker, with workers that only join and heartbeat."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas import topics
from schemas.codec import encode
from schemas.dead_letters import CUT, REASON
from schemas.fleet import join
from schemas.headers import ReplyTo, reply_headers, reply_to
from schemas.records import (
    Admitted,
    Decision,
    Dispatch,
    Dispatched,
    Heartbeat,
    InferenceRequest,
    Rejected,
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


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of its own, with the topics of the deployment."""
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def admission(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdmissionProcess]:
    process = AdmissionProcess(bootstrap, tmp_path_factory.mktemp("admission"))
    try:
        process.wait_ready()
        yield process
        if process.process.poll() is None:  # the test of a restart ends it by another
            assert process.stop() == 0, process.log_file.read_text()
    finally:
        process.kill()


@pytest.fixture
async def client(bootstrap: str, admission: AdmissionProcess) -> AsyncIterator[Fleet]:
    async with fleet(bootstrap) as client:
        await client.put_tenant(make_tenant())
        yield client


async def settled(client: Fleet) -> None:
    """Control records and the worker's heartbeats have reached admission: one of each takes 150 ms."""
    await client.read_for(0.4)


async def send_usage(client: Fleet, request: InferenceRequest, epoch: int, tokens: int) -> None:
    """What worker 0 writes at the end of a request, half of `tokens` in and half out."""
    usage = Usage(
        request_id=request.request_id,
        attempt=request.attempt,
        sealed=False,
        tenant=request.tenant,
        priority=request.priority,
        model=request.model,
        input_tokens=tokens // 2,
        cached_tokens=0,
        output_tokens=tokens // 2,
        finish_reason="stop",
        accepted_at=request.accepted_at,
        ended_at=request.accepted_at,
        slot=0,
        epoch=epoch,
    )
    partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
    await client.producer.send_and_wait(topics.USAGE, encode(usage), partition=partition)


async def test_a_request_is_dispatched_before_its_owner_hears_so(client: Fleet) -> None:
    async with worker(client, 0) as (epoch, _):
        await settled(client)
        request = make_request(reply_partition=4)
        offset = await client.send(request)
        partition = topics.tenant_partition("demo", 0, LAYOUT.shards)
        assert await client.answer(request, Dispatched) == Dispatched(
            request.request_id, 1, request.owner_epoch, 0, epoch, request.model, partition, offset
        )
        dispatch = await client.answer(request, Dispatch)
        assert (dispatch.slot, dispatch.epoch, dispatch.request) == (0, epoch, request)
        (mailbox,) = [s for s in client.seen if isinstance(s.value, Dispatch) and s.value == dispatch]
        assert mailbox.partition == topics.partition(0, 0)
        assert reply_to(mailbox.headers) == (request.request_id, 1, 4)
        (reply,) = [s for s in client.seen if isinstance(s.value, Dispatched)]
        assert reply.partition == 4
        decision = (await client.wait_for(lambda: client.answers(request, Decision)))[0]
        assert (decision.action, decision.slot) == ("dispatch", 0)


async def test_over_the_limit_is_refused_until_usage_settles(client: Fleet) -> None:
    await client.put_tenant(make_tenant("small", limits=limits(tokens_per_minute=30)))
    async with worker(client, 0) as (epoch, _):
        await settled(client)
        first, second, third = (make_request(tenant="small") for _ in range(3))
        await client.send(first)
        await client.answer(first, Dispatched)
        await client.send(second)
        rejected = await client.answer(second, Rejected)
        assert (rejected.status, rejected.code) == (429, "token_rate_exceeded")
        assert 0 < rejected.retry_after_ms <= 60_000
        await send_usage(client, first, epoch, tokens=2)
        await settled(client)
        await client.send(third)
        await client.answer(third, Dispatched)


async def test_cancelled_while_queued(client: Fleet) -> None:
    async with worker(client, 0, max_num_seqs=1, num_running=1) as (_, status):
        await settled(client)
        request, other = make_request(), make_request()
        offset = await client.send(request)
        admitted = await client.answer(request, Admitted)
        partition = topics.tenant_partition("demo", 0, LAYOUT.shards)
        assert (admitted.requests_partition, admitted.requests_offset) == (partition, offset)
        await client.cancel(request)
        rejected = await client.answer(request, Rejected)
        assert (rejected.status, rejected.code) == (499, "cancelled")
        await client.send(other)
        await client.answer(other, Admitted)
        status.num_running = 0
        await client.answer(other, Dispatched)
        assert not client.answers(request, Dispatch)


async def test_a_request_whose_dispatch_is_too_large_is_refused_as_that(client: Fleet) -> None:
    request, good = make_request(), make_request()
    async with worker(client, 0):
        await settled(client)
        # The largest that its own topic takes: a Dispatch has at least three bytes more.
        room = topics.MAX_RECORD_BYTES
        while True:
            room -= 2
            request.sampling.stop = ["x" * (room - len(encode(good)))]
            try:
                await client.send(request)
                break
            except MessageSizeTooLargeError:
                assert room > topics.MAX_RECORD_BYTES - 1_000
        rejected = await client.answer(request, Rejected)
        assert (rejected.status, rejected.code) == (413, "request_too_large")
        assert rejected.retry_after_ms is None
        await client.send(good)
        await client.answer(good, Dispatched)


async def test_what_cannot_be_decoded_is_kept_refused_and_blocks_nobody(client: Fleet) -> None:
    poison, good = make_request(), make_request()
    partition = topics.tenant_partition("demo", 0, LAYOUT.shards)
    headers = reply_headers(ReplyTo(poison.request_id, 1, 3))
    async with worker(client, 0):
        await settled(client)
        for value in (b"not avro", encode(poison)[:-3], encode(Heartbeat("worker", 0, 0, b"")), b""):
            client.seen.clear()
            await client.producer.send_and_wait(
                topics.REQUESTS, value, key=b"k", partition=partition, headers=headers
            )
            rejected = await client.answer(poison, Rejected)
            assert (rejected.status, rejected.code) == (400, "undecodable_record")
            kept = await client.wait_for(lambda: [s for s in client.seen if s.topic.endswith(".dlq")])
            assert (kept[0].raw, kept[0].partition) == (value, partition)
            assert dict(kept[0].headers)[REASON].decode() == rejected.message
            assert reply_to(kept[0].headers) == reply_to(headers)
        # As large as the topic takes: with the reason beside it the whole would be too large.
        large = b"\xff" * (topics.MAX_RECORD_BYTES - 300)
        client.seen.clear()
        await client.producer.send_and_wait(topics.REQUESTS, large, partition=partition, headers=headers)
        await client.answer(poison, Rejected)
        kept = await client.wait_for(lambda: [s for s in client.seen if s.topic.endswith(".dlq")])
        assert large.startswith(kept[0].raw)
        assert dict(kept[0].headers)[CUT] == f"value of {len(large)} bytes".encode()
        await client.producer.send_and_wait(topics.REQUESTS, b"no owner named", partition=partition)
        await client.send(good)
        await client.answer(good, Dispatched)


async def test_a_tenant_is_in_force_two_seconds_after_its_record(client: Fleet) -> None:
    async with worker(client, 0):
        await settled(client)
        for disabled, kind in ((True, Rejected), (False, Dispatched)):
            await client.put_tenant(make_tenant("late", disabled=disabled))
            async with asyncio.timeout(2):
                while True:
                    request = make_request(tenant="late")
                    await client.send(request)
                    if isinstance(await client.answer(request, Rejected | Dispatched), kind):
                        break
        await client.put_tenant(None, "late")


async def test_a_tenant_is_served_from_the_moment_its_record_is_acked(client: Fleet) -> None:
    async with worker(client, 0):
        await settled(client)
        for number in range(5):
            name = f"new-{number}"
            await client.put_tenant(make_tenant(name), name)
            request = make_request(tenant=name)
            await client.send(request)
            assert isinstance(await client.answer(request, Rejected | Dispatched), Dispatched)


async def test_nothing_goes_to_a_worker_that_left(client: Fleet) -> None:
    async with worker(client, 1):
        await settled(client)
    request = make_request()
    await client.send(request)
    await client.answer(request, Admitted)
    async with worker(client, 1) as (epoch, _):
        assert (await client.answer(request, Dispatched)).epoch == epoch


async def test_metrics_and_health(client: Fleet, admission: AdmissionProcess) -> None:
    assert admission.get("/health/live")[0] == 200
    status, text = admission.get("/metrics")
    assert status == 200
    assert 'headrace_admission_dispatches_total{class="interactive"}' in text
    assert 'headrace_admission_queued_requests{class="batch"} 0.0' in text
    assert "headrace_admission_decision_seconds_count" in text
    assert "demo" not in text


async def test_a_restart_announces_its_takeover_and_skips_what_lies_before(
    bootstrap: str, client: Fleet, admission: AdmissionProcess, tmp_path: Path
) -> None:
    """Kills the shared process last, and serves on with a new one in its slot."""
    partition = topics.tenant_partition("demo", 0, LAYOUT.shards)
    before = await client.wait_for(client.heartbeat_of_admission)
    await client.put_tenant(make_tenant("spent", limits=limits(tokens_per_minute=12_000)))
    await send_usage(client, make_request(tenant="spent"), epoch=0, tokens=12_000)
    waits = make_request()
    await client.send(waits)  # no worker lives: it is in the queue when the process dies
    await client.answer(waits, Admitted)
    os.kill(admission.process.pid, signal.SIGSTOP)  # sees nothing of this one
    unseen = make_request()
    offset = await client.send(unseen)
    successor = AdmissionProcess(bootstrap, tmp_path)
    try:
        successor.wait_ready()

        def announced() -> int | None:
            heartbeat = client.heartbeat_of_admission()
            if heartbeat is None or heartbeat.epoch <= before.epoch:
                return None
            return next((s.takeover_offset for s in heartbeat.partitions if s.partition == partition), None)

        assert await client.wait_for(announced) == offset + 1
        async with worker(client, 0):
            after = make_request()
            await client.send(after)
            await client.answer(after, Dispatched)
            # The minute's usage is known to the new process too.
            over = make_request(tenant="spent", max_tokens=8_000, end_ms=60_000)
            await client.send(over)
            assert (await client.answer(over, Rejected)).status == 429
            # Nothing was dispatched of its own accord: owners send again.
            assert not client.answers(waits, Dispatched)
            assert not client.answers(unseen, Dispatched)
            await client.send(unseen)
            await client.answer(unseen, Dispatched)
        # The one that was stopped wakes, sees a younger epoch in its slot, and goes.
        os.kill(admission.process.pid, signal.SIGCONT)
        # (Or its group tells it first: then it has failed.)
        status = await asyncio.to_thread(admission.process.wait, 20)
        assert status in (1, 3), admission.log_file.read_text()
        await client.read_for(0.3)
        assert len(client.answers(unseen, Dispatched)) == 1
        assert not client.answers(waits, Dispatched)
    finally:
        successor.kill()


async def test_a_younger_process_in_the_slot_ends_the_older(bootstrap: str, tmp_path: Path) -> None:
    process = AdmissionProcess(bootstrap, tmp_path, slot=7)
    try:
        process.wait_ready()
        async with fleet(bootstrap) as client:
            await join(client.producer, "admission", 7)
        assert await asyncio.to_thread(process.process.wait, 10) == 3, process.log_file.read_text()
    finally:
        process.kill()


def test_wrong_configuration_is_told_and_nothing_starts(bootstrap: str, tmp_path: Path) -> None:
    process = AdmissionProcess(bootstrap, tmp_path, HEADRACE_MAX_QUEUED_REQUESTS="0", HEADRACE_SHARDS="x")
    assert process.process.wait(30) == 2
    text = process.log_file.read_text()
    assert "HEADRACE_SHARDS='x'" in text
