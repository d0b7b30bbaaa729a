"""One worker process with the simulated runner against a real broker."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict

import pytest
from fastavro import parse_schema, schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form

from schemas import topics
from schemas.dead_letters import CUT, REASON
from schemas.headers import ReplyTo, reply_headers
from schemas.prefix_sketch import holds, prefix_keys
from schemas.records import (
    Cancellation,
    Completion,
    Dispatch,
    Heartbeat,
    InferenceRequest,
    Left,
    Tokens,
)
from tests.own_broker import own_broker
from tests.service_process import ROOT
from tests.worker_harness import (
    LAYOUT,
    FleetClient,
    WorkerProcess,
    fleet_client,
    make_inference_request,
)
from workers.simulated_runner import SimulatedRunner

SLOT = 0


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of its own, with the topics of the deployment."""
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def worker(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    settings = {"HEADRACE_STEP_MS": "3", "HEADRACE_KV_MEMORY_MIB": "4", "HEADRACE_MAX_MODEL_LEN": "2000"}
    worker = WorkerProcess(bootstrap, SLOT, tmp_path_factory.mktemp("worker"), settings)
    try:
        worker.wait_ready()
        yield worker
        status = worker.stop()
        assert status == 0, worker.log_file.read_text()
    finally:
        worker.process.kill()


@pytest.fixture
async def client(bootstrap: str) -> AsyncIterator[FleetClient]:
    async with fleet_client(bootstrap) as client:
        yield client


@pytest.fixture
async def epoch(worker: WorkerProcess, client: FleetClient) -> int:
    return await client.epoch(SLOT)


def expected_tokens(request: InferenceRequest, count: int) -> list[int]:
    runner = SimulatedRunner(vocab_size=127, first_token_id=32)
    return [runner.token_at(request.request_id, p) for p in range(count)]


async def free_blocks_are_all(client: FleetClient) -> None:
    def all_free() -> bool:
        heartbeat = client.heartbeat(SLOT)
        return (
            heartbeat is not None
            and heartbeat.worker is not None
            and heartbeat.worker.free_blocks == heartbeat.worker.num_blocks
        )

    client.seen.clear()
    await client.wait_for(all_free)


async def test_a_dispatch_gives_tokens_then_usage_then_completion(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(prompt_len=40, max_tokens=16)
    await client.dispatch(SLOT, epoch, request)
    completion, usage = await client.end(request)
    state = client.state(request)
    assert state.end == completion.value
    assert state.gap is None
    assert state.token_ids == expected_tokens(request, 16)
    assert state.run == (SLOT, epoch)
    assert state.finish_reason == "length"
    assert (completion.value.input_tokens, completion.value.output_tokens) == (40, 16)
    assert completion.value.finish_reason == "length"
    assert completion.value.message is None

    row = usage.value
    assert usage.partition == topics.tenant_partition("acme", 0, LAYOUT.shards)
    assert (row.input_tokens, row.output_tokens, row.finish_reason) == (40, 16, "length")
    assert (row.tenant, row.model, row.accepted_at) == ("acme", "simulated", request.accepted_at)
    assert (row.sealed, row.slot, row.epoch) == (False, SLOT, epoch)
    last_token = max(s.timestamp for s in client.seen if isinstance(s.value, Tokens))
    assert last_token <= usage.timestamp <= completion.timestamp
    assert dict(usage.headers)["request_id"] == request.request_id


async def test_one_record_carries_a_step_of_all_requests_of_a_partition(
    client: FleetClient, epoch: int
) -> None:
    requests = [make_inference_request(max_tokens=200) for _ in range(8)]
    await asyncio.gather(*(client.dispatch(SLOT, epoch, request) for request in requests))
    for request in requests:
        await client.end(request)
        assert client.tokens(request) == expected_tokens(request, 200)
    records = client.values(Tokens)
    assert len(records) < 8 * 200 / 2
    assert max(len(r.chunks) for r in records) == 8


async def test_a_cancelled_request_ends_with_what_was_generated_and_frees_its_blocks(
    client: FleetClient, epoch: int
) -> None:
    request = make_inference_request(max_tokens=1500, tenant="globex")
    await client.dispatch(SLOT, epoch, request)
    await client.wait_for(lambda: len(client.tokens(request)) > 5)
    await client.cancel(request)
    completion, usage = await client.end(request)
    tokens = client.tokens(request)
    assert completion.value.finish_reason == usage.value.finish_reason == "cancelled"
    assert 5 < len(tokens) < 1000
    assert completion.value.output_tokens == usage.value.output_tokens == len(tokens)
    assert client.state(request).end == completion.value
    await free_blocks_are_all(client)


async def test_a_cancel_that_comes_first_stops_the_dispatch(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(max_tokens=1500)
    await client.cancel(request)
    await client.read_for(0.3)
    await client.dispatch(SLOT, epoch, request)
    completion, usage = await client.end(request)
    assert completion.value.finish_reason == "cancelled"
    assert usage.value.output_tokens == 0
    assert client.tokens(request) == []


async def test_a_cancel_of_another_run_means_nothing_here(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(max_tokens=60)
    await client.dispatch(SLOT, epoch, request)
    await client.cancel(request, slot=SLOT, epoch=epoch - 1)
    assert (await client.end(request))[0].value.finish_reason == "length"


async def test_a_doubled_dispatch_runs_once(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(max_tokens=10)
    await client.dispatch(SLOT, epoch, request)
    await client.dispatch(SLOT, epoch, request)
    await client.end(request)
    await client.dispatch(SLOT, epoch, request)
    fence = make_inference_request()
    await client.dispatch(SLOT, epoch, fence)
    await client.end(fence)
    completions = [c for c in client.values(Completion) if c.request_id == request.request_id]
    assert len(completions) == 1
    ids = [
        i
        for t in client.values(Tokens)
        for c in t.chunks
        if c.request_id == request.request_id
        for i in c.token_ids
    ]
    assert ids == expected_tokens(request, 10)


async def test_a_higher_attempt_replaces_a_lower_one_and_goes_on_where_it_was(
    client: FleetClient, epoch: int
) -> None:
    first = make_inference_request(max_tokens=1500)
    await client.dispatch(SLOT, epoch, first)
    await client.wait_for(lambda: len(client.tokens(first)) > 5)
    second = make_inference_request(
        max_tokens=30, attempt=2, request_id=first.request_id, output_token_ids=client.tokens(first)[:4]
    )
    await client.dispatch(SLOT, epoch, second)
    completion, usage = await client.end(second)
    assert client.tokens(second) == expected_tokens(first, 30)
    assert client.state(second).end == completion.value
    assert (usage.value.attempt, usage.value.output_tokens) == (2, 30)
    # The overtaken attempt says nothing more, and is not taken again.
    await client.dispatch(SLOT, epoch, first)
    fence = make_inference_request()
    await client.dispatch(SLOT, epoch, fence)
    await client.end(fence)
    assert [c.attempt for c in client.values(Completion) if c.request_id == first.request_id] == [2]
    await free_blocks_are_all(client)


async def test_a_dispatch_to_another_epoch_is_dropped(client: FleetClient, epoch: int) -> None:
    other = make_inference_request()
    await client.dispatch(SLOT, epoch - 1, other)
    fence = make_inference_request()
    await client.dispatch(SLOT, epoch, fence)
    await client.end(fence)
    assert client.state(other).run is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_inference_request(prompt_len=2000), "the prompt has 2000 tokens, the model's context is 2000"),
        (make_inference_request(model="other"), "model: this worker serves 'simulated', not 'other'"),
        (make_inference_request(max_tokens=0), "max_tokens: must be at least 1"),
    ],
)
async def test_what_cannot_run_ends_with_the_reason_and_a_usage_row(
    client: FleetClient, epoch: int, request_: InferenceRequest, message: str
) -> None:
    await client.dispatch(SLOT, epoch, request_)
    completion, usage = await client.end(request_)
    assert completion.value.finish_reason == usage.value.finish_reason == "error"
    assert message in completion.value.message
    assert usage.value.output_tokens == 0
    assert client.state(request_).end == completion.value


async def test_what_cannot_be_decoded_is_refused_to_its_owner_and_kept(
    client: FleetClient, epoch: int
) -> None:
    request = make_inference_request()
    headers = reply_headers(ReplyTo(request.request_id, 1, request.reply_partition))
    await client.producer.send_and_wait(
        topics.PREFILL, b"\xc3\x01garbage!", partition=topics.partition(SLOT, 0), headers=headers
    )
    await client.producer.send_and_wait(topics.PREFILL, b"", partition=topics.partition(SLOT, 0))
    # As large as the topic takes: with the reason beside it the whole would be too large.
    large = b"\xff" * (topics.MAX_RECORD_BYTES - 100)
    await client.producer.send_and_wait(topics.PREFILL, large, partition=topics.partition(SLOT, 0))
    state = await client.wait_for(lambda: state if (state := client.state(request)).ended else None)
    assert isinstance(state.end, Completion)
    assert state.end.finish_reason == "error"
    assert "cannot be decoded" in (state.end.message or "")
    dlq = topics.dlq(topics.PREFILL)
    dead = await client.wait_for(
        lambda: letters if len(letters := [s for s in client.seen if s.topic == dlq]) == 3 else None
    )
    cut = dead.pop()
    assert dict(cut.headers)[CUT] == f"value of {len(large)} bytes".encode()
    reasons = {dict(letter.headers).get("request_id"): dict(letter.headers)[REASON] for letter in dead}
    assert b"unknown schema fingerprint" in reasons[request.request_id]
    assert b"begins with nothing" in reasons[None]
    fence = make_inference_request()
    await client.dispatch(SLOT, epoch, fence)
    await client.end(fence)


async def write_as_newer(
    client: FleetClient, record: Cancellation | Dispatch, topic: str, partition: int
) -> None:
    """Appends the record by a schema with a field more, which it says to the log just before."""
    schema = json.loads((ROOT / "schemas" / "avro" / f"{type(record).__name__}.avsc").read_text())
    schema["fields"].append({"name": "lane", "type": "string", "default": "", "doc": "Not known here."})
    parsed = parse_schema(schema)
    digest = bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))
    body = io.BytesIO()
    schemaless_writer(body, parsed, {**asdict(record), "lane": "left"})
    await client.producer.send_and_wait(
        topics.SCHEMAS, json.dumps(schema).encode(), key=digest.hex().encode(), partition=0
    )
    await client.producer.send_and_wait(topic, b"\xc3\x01" + digest + body.getvalue(), partition=partition)


async def test_a_newer_writers_dispatch_is_taken_once_its_schema_is_known(
    client: FleetClient, epoch: int
) -> None:
    request = make_inference_request(max_tokens=7)
    dispatch = Dispatch(SLOT, epoch, 7, request)
    await write_as_newer(client, dispatch, topics.PREFILL, topics.partition(SLOT, 0))
    await client.end(request)
    assert client.tokens(request) == expected_tokens(request, 7)


async def test_a_newer_writers_cancel_is_heeded_once_its_schema_is_known(
    client: FleetClient, epoch: int
) -> None:
    request = make_inference_request(max_tokens=1500)
    await client.dispatch(SLOT, epoch, request)
    await client.wait_for(lambda: len(client.tokens(request)) > 5)
    cancel = Cancellation(request.request_id, request.attempt, request.tenant, "test")
    partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
    await write_as_newer(client, cancel, topics.CANCELLATIONS, partition)
    completion, _ = await client.end(request)
    assert completion.value.finish_reason == "cancelled"


async def test_heartbeats_tell_which_prefixes_are_cached(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(prompt_len=190, max_tokens=2)
    keys = prefix_keys(request.prompt_token_ids, request.tenant)
    (unknown, *_) = prefix_keys(request.prompt_token_ids, "another tenant")
    await client.dispatch(SLOT, epoch, request)
    await client.end(request)
    assert len(keys) == 3  # 64, 96, 128

    def told() -> bytes | None:
        heartbeat = client.heartbeat(SLOT)
        sketch = b"" if heartbeat is None or heartbeat.worker is None else heartbeat.worker.prefix_sketch
        return sketch if sketch and holds(sketch, keys[-1]) else None

    sketch = await client.wait_for(told)
    assert all(holds(sketch, key) for key in keys)
    assert not holds(sketch, unknown)


async def test_heartbeats_come_every_100_ms_and_count_what_was_read(client: FleetClient, epoch: int) -> None:
    request = make_inference_request(max_tokens=200, priority=2)
    await client.dispatch(SLOT, epoch, request)
    await client.end(request)
    await client.read_for(1.0)
    beats = [s for s in client.seen if isinstance(s.value, Heartbeat) and s.value.slot == SLOT]
    assert {b.value.epoch for b in beats} == {epoch}
    assert len({b.value.nonce for b in beats}) == 1
    spacing = (beats[-1].timestamp - beats[0].timestamp) / (len(beats) - 1)
    assert 90 <= spacing <= 200
    running = [b.value.worker for b in beats if b.value.worker.num_running]
    assert running
    assert running[0].free_blocks < running[0].num_blocks
    assert running[0].mailbox_offsets[2] == beats[-1].value.worker.mailbox_offsets[2] > 0
    assert 2 < beats[-1].value.worker.step_time_ms < 30


async def test_metrics_and_health(client: FleetClient, epoch: int, worker: WorkerProcess) -> None:
    request = make_inference_request(max_tokens=5)
    await client.dispatch(SLOT, epoch, request)
    await client.end(request)
    assert worker.get("/health/live") == (200, "ok")
    status, text = worker.get("/metrics")
    assert status == 200
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_sum",
    ):
        assert f"{name}{{" in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="simulated"}' in text
    assert "acme" not in text


async def test_nobody_has_left(client: FleetClient, epoch: int) -> None:
    assert client.values(Left) == []
