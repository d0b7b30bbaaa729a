"""The audit over a whole stack that did a little of everything: nothing is found until something is wrong."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from infra.audit.audit import Settings
from infra.audit.clients import read_client_records
from infra.audit.findings import Kind
from infra.cli import app
from schemas import topics
from schemas.codec import encode
from schemas.fleet import PRODUCER_SETTINGS
from schemas.object_store import open_store
from schemas.records import InferenceRequest, Usage
from schemas.topics import Layout
from tests.audit_faults import (
    FAULTS,
    Alter,
    bill_what_was_not_asked,
    double_a_token,
    drop_a_token,
    drop_the_last_token,
    leak_a_block,
    run_a_ghost,
)
from tests.audit_recording import Recording, completion_of, record
from tests.e2e.conftest import TENANT, RunningStack, running_stack, simulated_config
from tests.e2e.test_batch_by_topic import exchange
from tests.e2e.test_batch_files import end_of, line, start
from tests.e2e.test_idempotency import BODY, KEY, refuse_one_choice
from tests.e2e.test_stream_resume import at, events, text_of
from tests.e2e.test_streams import eventually

ITEMS = 20
Busy = tuple[RunningStack, list[bytes]]


def line_of(answer: httpx.Response, told: list[Any], end: str | None) -> bytes:
    """A client's record of a stream. A simulated token is one character."""
    record = {
        "request_id": answer.headers["x-headrace-stream"],
        "status": answer.status_code,
        "tokens": len(text_of(told)),
        "end": end,
    }
    return json.dumps(record).encode()


def whole_stream(running: RunningStack, tokens: int, prompt: str = "hi") -> bytes:
    with at(running, "gateway-0") as client:
        answer = client.post("/v1/generate", json={**BODY, "prompt": prompt, "max_tokens": tokens})
    told = events(answer)
    return line_of(answer, told, told[-1][1]["stop_reason"])


def left_stream(running: RunningStack) -> bytes:
    """Its client reads a part and goes."""
    with (
        at(running, "gateway-0") as client,
        client.stream("POST", "/v1/generate", json={**BODY, "max_tokens": 2_000}) as answer,
    ):
        lines = answer.iter_lines()
        text = "\n".join(next(lines) for _ in range(60)) + "\n\n"
        return line_of(answer, events(httpx.Response(200, text=text)), None)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """A stack, and what its clients say they got."""
    config = simulated_config(tmp_path_factory.mktemp("audited"), workers=2, gateways=2, step_ms=5.0)
    with running_stack(config) as running:
        with ThreadPoolExecutor(10) as pool:
            first = [pool.submit(whole_stream, running, 40 + n) for n in range(4)]
            lines = [stream.result() for stream in first]  # these of one attempt
            streams = [pool.submit(left_stream, running) for _ in range(2)]
            lasting = [pool.submit(whole_stream, running, 600, f"long {n}") for n in range(4)]
            eventually(lambda: running.metric("worker-1", "vllm:num_requests_running") >= 1)
            running.stack.kill("worker-1")  # with its parent: what it ran is retried
            lines += [stream.result() for stream in streams + lasting]
        running.call(running.stack.restart("worker-1"))
        with at(running, "gateway-0") as client, at(running, "gateway-1") as other:
            for each in (client, other, client):
                assert each.post("/v1/generate", json=BODY, headers=KEY).status_code == 200
        refuse_one_choice(running)()
        running.tenant("batches")
        item = {"model": running.model, "prompt": "hi", "max_tokens": 4}
        exchange(running, "batches", [{"custom_id": f"n{n}", **item} for n in range(3)], answers=3)
        with openai.OpenAI(base_url=f"{running.stack.url()}/v1", api_key=running.api_key) as client:
            lines_of_file = [line(f"n{n}", max_tokens=5 + n) for n in range(ITEMS)]
            assert end_of(client, start(client, lines_of_file).id).status == "completed"
        yield running, lines


def command(running: RunningStack, client_records: Path, passes: int) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `headrace audit`."""
    asked = ["audit", "--json", "--kafka", running.stack.bootstrap_servers, "--sql", running.stack.sql_url]
    asked += ["--objects", str(objects_of(running)), "--client-records", str(client_records)]
    asked += ["--last", "20m", "--passes", str(passes), "--settle", "2"]
    answer = CliRunner().invoke(app, asked)
    assert answer.stdout, answer.output
    return answer.exit_code, json.loads(answer.stdout)


def objects_of(running: RunningStack) -> Path:
    return running.stack.config.data_dir / "objects"


def settings_of(running: RunningStack) -> Settings:
    return Settings(
        since_ms=int(time.time() * 1_000) - 1_200_000,
        sql=running.stack.sql_url,
        objects=open_store(str(objects_of(running))),
    )


@pytest.fixture(scope="module")
def client_records(busy: Busy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clients") / "records.jsonl"
    path.write_bytes(b"\n".join(busy[1]))
    return path


@pytest.fixture(scope="module")
def clean(busy: Busy, client_records: Path) -> tuple[int, dict[str, Any]]:
    """What the command says before anything is done to the log."""
    return command(busy[0], client_records, passes=3)


def test_nothing_is_found_where_nothing_is_wrong(clean: tuple[int, dict[str, Any]]) -> None:
    status, told = clean
    assert (status, told["findings"], told["not_judged"]) == (0, [], [])
    seen = told["looked_at"]
    assert seen["requests"] == seen["ended"] >= 10 + 3 + ITEMS
    # Workers lost, clients that left, choices refused beside others, a key used again.
    assert seen.keys() >= {"retried", "cancelled", "waived", "joined"}
    assert (seen["batch records"], seen["batches"], seen["batch lines"]) == (3, 1, ITEMS)
    assert (seen["client records"], seen["workers"], seen["reservations"]) == (10, 2, 0)


@pytest.fixture(scope="module")
def recorded(busy: Busy, clean: object) -> tuple[Recording, Settings]:
    """By `clean` all has settled."""
    running, lines = busy
    settings = settings_of(running)
    kafka, layout = running.stack.bootstrap_servers, running.stack.config.layout
    return running.call(record(kafka, layout, settings, read_client_records(lines))), settings


def streamed(recording: Recording) -> bytes:
    """A request of the first attempt that its client read to the end."""
    (name,) = (name for name, (record,) in recording.clients.items() if record.num_tokens == 42)
    return name


def test_as_it_was_recorded_nothing_is_wrong(recorded: tuple[Recording, Settings]) -> None:
    recording, settings = recorded
    report = recording.audit(settings)
    assert report.findings == []
    assert report.looked_at["requests"] == report.looked_at["ended"] > ITEMS


@pytest.mark.parametrize(("kind", "alter"), FAULTS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_each_fault_is_named_with_its_request(
    recorded: tuple[Recording, Settings], kind: Kind, alter: Alter
) -> None:
    recording, settings = recorded[0].copy(), recorded[1]
    victim = streamed(recording)
    alter(recording, victim)
    found = recording.audit(settings).findings
    print(found)
    assert [(each.kind, each.request_id, each.tenant) for each in found] == [(kind, victim.hex(), TENANT)]
    assert found[0].figures or kind is Kind.TWO_ENDS


@pytest.mark.parametrize(
    ("kind", "alter"),
    [
        (Kind.DROPPED_TOKEN, drop_a_token),
        (Kind.DROPPED_TOKEN, drop_the_last_token),
        (Kind.DOUBLED_TOKEN, double_a_token),
    ],
)
def test_a_token_too_few_or_too_many_in_the_log_is_one(
    recorded: tuple[Recording, Settings], kind: Kind, alter: Alter
) -> None:
    """The request has no end then: its run says another number than was counted."""
    recording, settings = recorded[0].copy(), recorded[1]
    victim = streamed(recording)
    recording.clients.clear()
    recording.now_ms += 20_000
    alter(recording, victim)
    assert [(each.kind, each.request_id) for each in recording.audit(settings).findings] == [
        (kind, victim.hex())
    ]


@pytest.mark.parametrize(
    ("kind", "alter", "slots"),
    [(Kind.LEAKED_BLOCK, leak_a_block, [0]), (Kind.GHOST_SEQUENCE, run_a_ghost, [0, 1])],
)
def test_what_a_worker_holds_on_to_is_named_with_its_slot(
    recorded: tuple[Recording, Settings], kind: Kind, alter: Alter, slots: list[int]
) -> None:
    recording, settings = recorded[0].copy(), recorded[1]
    alter(recording, b"")
    found = recording.audit(settings).findings
    assert [(each.kind, each.figures["slot"]) for each in found] == [(kind, slot) for slot in slots]


def test_a_row_of_nobody(recorded: tuple[Recording, Settings]) -> None:
    recording, settings = recorded[0].copy(), recorded[1]
    bill_what_was_not_asked(recording, streamed(recording))
    recording.now_ms += 60_000
    found = recording.audit(settings).findings
    assert [(each.kind, each.request_id) for each in found] == [(Kind.UNKNOWN_ROW, "00" * 16)]


def test_results_of_batches(recorded: tuple[Recording, Settings]) -> None:
    recording, settings = recorded

    def kinds(alter: Callable[[Recording], object]) -> list[Kind]:
        altered = recording.copy()
        alter(altered)
        return [each.kind for each in altered.audit(settings).findings]

    ((state, lines),) = recording.batches
    first = min(lines["output"])
    assert kinds(lambda r: r.answered.pop()) == [Kind.LOST_RESULT]
    assert kinds(lambda r: r.answered.append(r.answered[0])) == [Kind.DOUBLED_RESULT]
    assert kinds(lambda r: r.batches[0][1]["output"].pop(first)) == [Kind.LOST_RESULT, Kind.BATCH_COUNTS]
    assert kinds(lambda r: r.batches[0][1]["output"].update([first])) == [
        Kind.DOUBLED_RESULT,
        Kind.BATCH_COUNTS,
    ]
    fewer = replace(state, total=ITEMS, completed=ITEMS - 1)
    assert kinds(lambda r: r.batches.__setitem__(0, (fewer, lines))) == [Kind.BATCH_COUNTS] * 2


async def spoil(kafka: str, layout: Layout, recording: Recording, victim: bytes) -> None:
    """A second end, and the same request billed to another tenant: in the log itself."""
    (asked,) = recording.all(topics.REQUESTS, InferenceRequest, lambda r: r.request_id == victim)
    (usage,) = recording.all(topics.USAGE, Usage, lambda u: u.request_id == victim)
    end = completion_of(recording, victim)
    producer = AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS)
    await producer.start()
    try:
        await producer.send_and_wait(topics.TOKENS, encode(end), partition=asked.reply_partition)
        elsewhere = topics.tenant_partition("batches", usage.priority, layout.shards)
        other = encode(replace(usage, tenant="batches"))
        await producer.send_and_wait(topics.USAGE, other, partition=elsewhere)
    finally:
        await producer.stop()


def test_the_command_names_what_was_done_to_the_log(
    busy: Busy, recorded: tuple[Recording, Settings], client_records: Path
) -> None:
    running, victim = busy[0], streamed(recorded[0])
    kafka, layout = running.stack.bootstrap_servers, running.stack.config.layout
    running.call(spoil(kafka, layout, recorded[0], victim))
    rows = f"SELECT count() FROM usage_final WHERE request_id = '{victim.hex()}'"
    eventually(lambda: running.sql(rows) == [["2"]])
    status, told = command(running, client_records, passes=1)
    found = {(each["kind"], each["request_id"]) for each in told["findings"]}
    # A hash of all they say decides which of the two rows counts: the other tenant's is the wrong one too.
    found.discard(("wrong_row", victim.hex()))
    assert (status, found) == (1, {("two_ends", victim.hex()), ("doubled_row", victim.hex())})
