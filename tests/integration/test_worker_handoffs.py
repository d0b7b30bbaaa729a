"""A prefill and a decode worker as processes, with a real broker and the real transfer engine over TCP."""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.local.verbs import VerbsError, ensure_verbs
from schemas import topics
from schemas.codec import encode
from schemas.dead_letters import REASON
from schemas.headers import ReplyTo, reply_headers
from schemas.records import Dispatch, Heartbeat, InferenceRequest, Join, Left, Pairing
from tests.own_broker import own_broker
from tests.worker_harness import (
    LAYOUT,
    FleetClient,
    WorkerProcess,
    handoff_client,
    make_inference_request,
)
from workers.simulated_runner import SimulatedRunner

PREFILL, DECODE = 0, 1
SIMULATED = {"HEADRACE_STEP_MS": "2", "HEADRACE_KV_MEMORY_MIB": "4", "HEADRACE_MAX_MODEL_LEN": "2000"}


@pytest.fixture(scope="module")
def verbs() -> dict[str, str]:
    try:
        env = ensure_verbs(os.environ, print)
    except VerbsError as error:
        pytest.skip(str(error))
    return {name: env[name] for name in ("LD_LIBRARY_PATH",) if name in env}


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


class Workers:
    """One of each role; started again when a test killed them."""

    def __init__(self, bootstrap: str, folder: Path, settings: dict[str, str]) -> None:
        self._bootstrap, self._folder, self._settings = bootstrap, folder, settings
        self.processes: dict[int, WorkerProcess] = {}
        self.ensure()

    def ensure(self) -> None:
        for slot, role in ((PREFILL, "prefill"), (DECODE, "decode")):
            known = self.processes.get(slot)
            if known is None or known.process.poll() is not None:
                settings = {**self._settings, "HEADRACE_WORKER_ROLE": role}
                self.processes[slot] = WorkerProcess(self._bootstrap, slot, self._folder, settings)
        for process in self.processes.values():
            process.wait_ready()

    def kill(self, slot: int) -> None:
        os.kill(self.processes[slot].child_pid, signal.SIGKILL)
        self.processes[slot].process.wait(20)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.fixture(scope="module")
def all_workers(
    bootstrap: str, verbs: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    workers = Workers(bootstrap, tmp_path_factory.mktemp("workers"), {**SIMULATED, **verbs})
    try:
        yield workers
        for process in workers.processes.values():
            assert process.stop() == 0, process.log_file.read_text()
    finally:
        workers.close()


@pytest.fixture
def workers(all_workers: Workers) -> Workers:
    all_workers.ensure()
    return all_workers


@pytest.fixture
async def client(bootstrap: str) -> AsyncIterator[FleetClient]:
    async with handoff_client(bootstrap) as client:
        yield client


def a_request(prompt_len: int = 200, max_tokens: int = 40) -> InferenceRequest:
    request = make_inference_request(prompt_len=prompt_len, max_tokens=max_tokens)
    request.prompt_token_ids = [32 + i % 90 for i in range(prompt_len)]
    return request


async def hand_over(client: FleetClient, request: InferenceRequest, lease_ms: int = 5000) -> tuple[int, int]:
    """As admission does. Returns the epochs of prefill and decode."""
    prefill, decode = await client.epoch(PREFILL), await client.epoch(DECODE)
    pairing = Pairing(os.urandom(16), DECODE, decode, 3000, lease_ms)
    record = Dispatch(PREFILL, prefill, request.sampling.max_tokens, request, pairing)
    partition = topics.partition(PREFILL, request.priority)
    await client.producer.send_and_wait(topics.PREFILL, encode(record), partition=partition)
    return prefill, decode


def expected_tokens(request: InferenceRequest) -> list[int]:
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)
    return [runner.token_at(request.request_id, p) for p in range(request.sampling.max_tokens)]


def figures(worker: WorkerProcess) -> dict[str, float]:
    """What its /metrics say of handoffs, by name and outcome."""
    lines = worker.get("/metrics")[1].splitlines()
    told = [line.rsplit(" ", 1) for line in lines if line.startswith(("headrace_handoffs", "headrace_kv_"))]
    return {name: float(value) for name, value in told}


async def all_blocks_are_free(client: FleetClient) -> None:
    def free(slot: int) -> bool:
        heartbeat: Heartbeat | None = client.heartbeat(slot)
        status = heartbeat.worker if heartbeat else None
        return status is not None and status.free_blocks == status.num_blocks and not status.num_running

    client.seen.clear()
    await client.wait_for(lambda: free(PREFILL) and free(DECODE))


async def test_a_prompt_goes_from_one_process_to_another(workers: Workers, client: FleetClient) -> None:
    requests = [a_request(17 + 60 * number) for number in range(8)]
    for number, request in enumerate(requests):
        # No two begin alike: what decode has cached of one is not sent again for another.
        request.prompt_token_ids[0] = 40 + number
        _, decode = await hand_over(client, request)
    for request in requests:
        completion, usage = await client.end(request)
        assert client.tokens(request) == expected_tokens(request)
        assert client.state(request).run == (DECODE, decode)
        assert (completion.value.finish_reason, usage.value.output_tokens) == ("length", 40)
    told = figures(workers.processes[DECODE])
    assert told['headrace_handoffs_total{outcome="adopted"}'] == 8
    sent = figures(workers.processes[PREFILL])
    assert sent["headrace_kv_sent_bytes_total"] == 16 * sum(len(r.prompt_token_ids) for r in requests)
    heartbeat = client.heartbeat(PREFILL)
    assert heartbeat is not None
    assert heartbeat.worker is not None
    assert heartbeat.worker.worker_role == "prefill"
    assert heartbeat.worker.transfer_bytes_per_s > 0
    heartbeat = client.heartbeat(DECODE)
    assert heartbeat is not None
    assert heartbeat.worker is not None
    assert heartbeat.worker.worker_role == "decode"
    assert heartbeat.worker.kv_layout is not None
    assert requests[-1].request_id in heartbeat.worker.handoffs
    await all_blocks_are_free(client)


async def test_a_dispatch_without_a_pairing_is_served_whole(workers: Workers, client: FleetClient) -> None:
    for slot in (PREFILL, DECODE):
        request = a_request()
        await client.dispatch(slot, await client.epoch(slot), request)
        await client.end(request)
        assert client.tokens(request) == expected_tokens(request)


async def test_a_cancelled_stream_ends_and_frees_its_blocks(workers: Workers, client: FleetClient) -> None:
    request = a_request(max_tokens=1500)
    await hand_over(client, request)
    await client.wait_for(lambda: len(client.tokens(request)) > 3)
    await client.cancel(request)
    completion, _ = await client.end(request)
    assert completion.value.finish_reason == "cancelled"
    early = a_request(max_tokens=1500)
    await hand_over(client, early)
    await client.cancel(early)
    completion, _ = await client.end(early)
    assert completion.value.finish_reason == "cancelled"
    await all_blocks_are_free(client)


async def test_what_cannot_be_read_is_kept_and_an_offer_is_refused_to_its_owner(
    workers: Workers, client: FleetClient
) -> None:
    request = a_request()
    decode = await client.epoch(DECODE)
    to = ReplyTo(request.request_id, request.attempt, request.reply_partition)
    partition = topics.partition(DECODE, 0)
    for value in (b"no record", encode(Join("worker", 9, b"12345678"))):
        await client.producer.send_and_wait(
            topics.DECODE, value, partition=partition, headers=reply_headers(to)
        )
    dlq = topics.dlq(topics.DECODE)
    await client.wait_for(lambda: sum(seen.topic == dlq for seen in client.seen) == 2)
    letters = [seen for seen in client.seen if seen.topic == dlq]
    assert {letter.partition for letter in letters} == {partition}
    assert letters[0].raw == b"no record"
    assert b"cannot be decoded" in dict(letters[0].headers)[REASON]
    assert b"Join" in dict(letters[1].headers)[REASON]
    end = await client.wait_for(lambda: client.state(request).end)
    assert (end.finish_reason, end.slot, end.epoch) == ("error", DECODE, decode)


async def test_prefill_dies_under_many_and_all_go_on(workers: Workers, client: FleetClient) -> None:
    requests = [a_request(1500, 30) for _ in range(12)]
    for request in requests:
        await hand_over(client, request)
    await client.wait_for(lambda: client.tokens(requests[0]))
    killed_at = time.monotonic()
    workers.kill(PREFILL)
    served = 0
    for request in requests:
        # What prefill never offered nobody has: its owner hears of the death, and tries again.
        end = partial(_end_or_quiet, client, request)
        if await client.wait_for(end) is not True:
            assert client.tokens(request) == expected_tokens(request)
            served += 1
    assert time.monotonic() - killed_at < 20
    assert served > 1
    workers.ensure()
    await all_blocks_are_free(client)


def _end_or_quiet(client: FleetClient, request: InferenceRequest) -> Any:
    """Its end; or True when prefill left 3 s ago by the log, and decode has never named the request."""
    state = client.state(request)
    if state.end is not None:
        return state.end
    lefts = [seen.timestamp for seen in client.seen if isinstance(seen.value, Left)]
    newest = max(seen.timestamp for seen in client.seen)
    return bool(lefts) and newest - lefts[0] > 3000 and state.run is None


async def test_decode_dies_and_prefill_serves_on(workers: Workers, client: FleetClient) -> None:
    requests = [a_request(1500, 300) for _ in range(4)]
    for request in requests:
        await hand_over(client, request)
    await client.wait_for(lambda: client.tokens(requests[0]))
    workers.kill(DECODE)
    # Its owner tries again: here, at the one that is left.
    again = a_request(1500, 300)
    await client.dispatch(PREFILL, await client.epoch(PREFILL), again)
    await client.end(again)
    assert client.tokens(again) == expected_tokens(again)
    workers.ensure()
    await all_blocks_are_free(client)
    request = a_request()
    client.seen.clear()
    await hand_over(client, request)
    await client.end(request)
    assert client.tokens(request) == expected_tokens(request)
