"""A stack with a worker for prompts and one that decodes: which way requests go, what is left of them in the
log, and what happens when one of the two is gone."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.audit.audit import Settings
from infra.audit.findings import Kind
from infra.local.services import split_roles
from infra.local.verbs import VerbsError
from schemas import topics
from schemas.clock import epoch_ms
from schemas.handoff_records import Message
from schemas.object_store import open_store
from schemas.records import Handoff, Offer, TransferEnded
from tests.audit_recording import Recording, record
from tests.e2e.conftest import TENANT, RunningStack, running_stack, simulated_config
from tests.e2e.test_streams import eventually
from tests.e2e.test_worker_change import Reading, simulated_text

PREFILL, DECODE = "worker-0", "worker-1"
LONG = "What stands here is computed by one worker and read by another. " * 50
TOKENS = 60


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    config = simulated_config(
        tmp_path_factory.mktemp("disaggregated"),
        workers=2,
        roles=split_roles(2),
        step_ms=10.0,
        # One stream at decode is enough for a long prompt to go elsewhere, and some slow steps are not.
        settings={"admission": {"HEADRACE_HANDOFF_STALL_WEIGHT": "1", "HEADRACE_HANDOFF_OVERHEAD_MS": "200"}},
    )
    try:
        with running_stack(config) as running:
            yield running
    except VerbsError as error:
        pytest.skip(str(error))


def sample(running: RunningStack, process: str, line: str) -> float:
    """The value of one line on /metrics, 0 where it is not there."""
    page = httpx.get(f"{running.stack.url(process)}/metrics", timeout=10.0).text
    return sum(float(each.rsplit(" ", 1)[1]) for each in page.splitlines() if each.startswith(line + " "))


def went(running: RunningStack, way: str) -> float:
    return sample(running, "admission-0", f'headrace_admission_routed_requests{{way="{way}"}}')


def missing(running: RunningStack, role: str) -> float:
    line = f'headrace_admission_missing_pool{{model="simulated",role="{role}"}}'
    return sample(running, "admission-0", line)


def adopted(running: RunningStack) -> float:
    return sample(running, DECODE, 'headrace_handoffs_total{outcome="adopted"}')


@contextmanager
def a_stream_at_decode(running: RunningStack) -> Iterator[Reading]:
    """It runs while the block does, and ends with it."""
    stream = Reading(running, "/v1/generate", prompt="steady", max_tokens=1_000)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read)
        assert stream.begun.wait(20)
        time.sleep(0.3)  # until a heartbeat has told admission of it
        yield stream
        reading.result()
    assert stream.text == simulated_text(stream.request_id, 1_000)


def ask(running: RunningStack, prompt: str, tokens: int = TOKENS) -> bytes:
    """A whole stream, to the byte what one worker alone gives; its request."""
    reading = Reading(running, "/v1/generate", prompt=prompt, max_tokens=tokens)
    reading.read()
    assert reading.text == simulated_text(reading.request_id, tokens)
    assert reading.output_tokens == tokens
    return reading.request_id


def ask_until_adopted(running: RunningStack, prompt: str, tries: int = 5) -> bytes:
    """While workers have measured little, what a handoff costs is a guess: a prompt may stay at decode."""
    with a_stream_at_decode(running):
        for number in range(tries):
            before = went(running, "handoff"), adopted(running)
            request_id = ask(running, f"{number} {prompt}")
            if (went(running, "handoff"), adopted(running)) == (before[0] + 1, before[1] + 1):
                return request_id
    raise AssertionError(f"none of {tries} prompts was handed over")


@pytest.fixture(scope="module")
def handed_over(running: RunningStack) -> bytes:
    """A request whose prompt went by way of prefill."""
    return ask_until_adopted(running, f"first {LONG}")


def test_a_long_prompt_is_computed_by_one_worker_and_decoded_by_the_other(
    running: RunningStack, handed_over: bytes
) -> None:
    assert sample(running, PREFILL, 'headrace_handoffs_total{outcome="written"}') >= 1
    rows = f"SELECT input_tokens, output_tokens FROM usage_final WHERE request_id = '{handed_over.hex()}'"
    eventually(lambda: running.sql(rows) == [[str(len(f"0 first {LONG}") + 1), str(TOKENS)]])
    assert running.sql("SELECT max(attempt) FROM usage_final") == [["1"]]


def test_a_short_prompt_skips_the_hop(running: RunningStack) -> None:
    with a_stream_at_decode(running):
        before = went(running, "short"), went(running, "handoff")
        ask(running, "hi")
        assert (went(running, "short"), went(running, "handoff")) == (before[0] + 1, before[1])


@pytest.fixture(scope="module")
def recorded(running: RunningStack, handed_over: bytes) -> tuple[Recording, Settings]:
    time.sleep(3.0)  # a worker counts a handoff for 2 s after it came
    stack = running.stack
    settings = Settings(
        since_ms=epoch_ms() - 1_200_000,
        sql=stack.sql_url,
        objects=open_store(str(stack.config.data_dir / "objects")),
    )
    made = running.call(record(stack.bootstrap_servers, stack.config.layout, settings, {}))
    made.now_ms += 60_000
    return made, settings


def test_the_audit_finds_nothing_of_transfers_that_were_in_order(
    recorded: tuple[Recording, Settings],
) -> None:
    report = recorded[0].audit(recorded[1])
    assert report.findings == []
    assert report.looked_at["transfers"] == report.looked_at["adopted"] >= 1


def never_end(recording: Recording, victim: bytes) -> None:
    recording.change(
        topics.DECODE, lambda r: None if isinstance(r, TransferEnded) and r.request_id == victim else r
    )


def strand_its_blocks(recording: Recording, victim: bytes) -> None:
    """Decode has given it up, and prefill never said that its writes are closed."""
    (told,) = recording.all(topics.DECODE, TransferEnded, lambda r: r.request_id == victim)
    recording.change(
        topics.DECODE, lambda r: None if isinstance(r, Handoff) and r.request_id == victim else r
    )
    recording.change(topics.DECODE, lambda r: replace(r, state="expired") if r == told else r)


def adopt_it_twice(recording: Recording, victim: bytes) -> None:
    (told,) = recording.all(topics.DECODE, TransferEnded, lambda r: r.request_id == victim)
    recording.append(topics.DECODE, replace(told, from_slot=told.to_slot, from_epoch=told.to_epoch))


def hand_it_over_twice(recording: Recording, victim: bytes) -> None:
    for logged in list(recording.log[topics.DECODE]):
        told: Message = logged.record
        asked = told.request if isinstance(told, Offer) else told
        if asked.request_id == victim:
            recording.append(topics.DECODE, replace(told, transfer_id=b"again"))


def count_it_for_ever(recording: Recording, victim: bytes) -> None:
    recording.heartbeats = [
        replace(beat, worker=replace(beat.worker, handoffs=[victim]))
        if beat.worker is not None and beat.worker.worker_role == "decode"
        else beat
        for beat in recording.heartbeats
    ]


@pytest.mark.parametrize(
    ("kinds", "alter"),
    [
        ({Kind.OPEN_TRANSFER}, never_end),
        ({Kind.OPEN_TRANSFER, Kind.STRANDED_BLOCKS}, strand_its_blocks),
        ({Kind.ADOPTED_TWICE}, adopt_it_twice),
        ({Kind.ADOPTED_TWICE}, hand_it_over_twice),
        ({Kind.LEAKED_HANDOFF}, count_it_for_ever),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_each_fault_of_a_transfer_is_named_with_its_request(
    recorded: tuple[Recording, Settings],
    handed_over: bytes,
    kinds: set[Kind],
    alter: Callable[[Recording, bytes], None],
) -> None:
    recording, settings = recorded[0].copy(), recorded[1]
    alter(recording, handed_over)
    found = recording.audit(settings).findings
    assert {each.kind for each in found} == kinds
    assert {(each.request_id, each.tenant) for each in found} == {(handed_over.hex(), TENANT)}


def test_a_block_that_a_transfer_leaves_behind_is_named_with_its_worker(
    recorded: tuple[Recording, Settings],
) -> None:
    recording, settings = recorded[0].copy(), recorded[1]
    recording.heartbeats = [
        replace(beat, worker=replace(beat.worker, free_blocks=beat.worker.free_blocks - 3))
        if beat.worker is not None and beat.worker.worker_role == "prefill"
        else beat
        for beat in recording.heartbeats
    ]
    (found,) = recording.audit(settings).findings
    assert (found.kind, found.figures["slot"], found.figures["leaked"]) == (Kind.LEAKED_BLOCK, 0, 3)


@pytest.mark.parametrize(("gone", "role"), [(PREFILL, "prefill"), (DECODE, "decode")])
def test_without_one_pool_the_other_serves_all_and_a_metric_says_so(
    running: RunningStack, recorded: object, gone: str, role: str
) -> None:
    running.stack.kill(gone)
    eventually(lambda: missing(running, role) == 1)
    before = went(running, "unpaired"), went(running, "handoff")
    ask(running, f"alone without {role} {LONG}")
    ask(running, "hi")
    assert (went(running, "unpaired"), went(running, "handoff")) == (before[0] + 2, before[1])
    running.call(running.stack.restart(gone))
    eventually(lambda: missing(running, role) == 0)


def test_prompts_are_handed_over_again_when_both_pools_are_back(running: RunningStack) -> None:
    ask_until_adopted(running, f"together again {LONG}")


def test_a_stream_goes_on_when_the_worker_dies_that_computes_its_prompt(running: RunningStack) -> None:
    with a_stream_at_decode(running), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, running, f"{n} dies with {LONG}") for n in range(4)]
        running.stack.kill(PREFILL)
        for each in asked:
            each.result(60)
    running.call(running.stack.restart(PREFILL))


class Timed(Reading):
    """A stream whose first text is timed (s of the monotonic clock)."""

    def __init__(self, running: RunningStack, prompt: str) -> None:
        super().__init__(running, "/v1/generate", prompt=prompt, max_tokens=TOKENS)

    def first_text(self) -> float:
        assert self.begun.wait(30)
        return time.monotonic()


def worker_proper(running: RunningStack, name: str) -> int:
    parent = running.stack.child(name).pid
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


def is_billed_once_for_its_second_attempt(running: RunningStack, stream: Reading) -> None:
    name = stream.request_id.hex()
    rows = f"SELECT attempt, output_tokens FROM usage_final WHERE request_id = '{name}'"
    eventually(lambda: running.sql(rows) == [["2", str(TOKENS)]])


def came_true(what: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gap_when_prefill_dies_before_its_offer(
    running: RunningStack, pool: ThreadPoolExecutor, prompt: str, kill: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds from the kill, and from the last that the fleet heard, to the stream's first text.

    Prefill is stopped while admission dispatches to it, so it offers nothing, and dies so.
    """
    for number in range(8):
        before, child = went(running, "handoff"), worker_proper(running, PREFILL)
        stream = Timed(running, f"{number} {prompt}")
        os.kill(child, signal.SIGSTOP)
        stopped = time.monotonic()
        reading = pool.submit(stream.read)
        was_given = came_true(lambda before=before: went(running, "handoff") > before, 0.5)  # type: ignore[misc]
        if was_given:
            killed = time.monotonic()
            kill(child)
            first = stream.first_text()
        else:
            os.kill(child, signal.SIGCONT)
        reading.result(60)
        assert stream.text == simulated_text(stream.request_id, TOKENS)
        assert stream.output_tokens == TOKENS
        if was_given:
            is_billed_once_for_its_second_attempt(running, stream)
            return first - killed, first - stopped
    raise AssertionError("no prompt was given to prefill")


@pytest.mark.parametrize("end", ["left", "silent"])
def test_a_prefill_worker_that_dies_before_its_offer_costs_no_more_than_its_death_is_told(
    running: RunningStack, end: str, capsys: pytest.CaptureFixture[str]
) -> None:

    def kill(child: int) -> None:
        if end == "left":  # its parent says so
            os.kill(child, signal.SIGKILL)
        else:
            running.stack.kill(PREFILL)

    try:
        with ExitStack() as stack:
            for _ in range(3):  # so that no prompt is better computed among them
                stack.enter_context(a_stream_at_decode(running))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            since_kill, since_heard = gap_when_prefill_dies_before_its_offer(
                running, pool, f"{end} {LONG}", kill
            )
            whole = Timed(running, f"whole after {end} {LONG}")
            asked = time.monotonic()
            reading = pool.submit(whole.read)
            prefill_s = whole.first_text() - asked
            reading.result(60)
    finally:
        running.call(running.stack.restart(PREFILL))
    with capsys.disabled():
        print(
            f"\n{end}: {since_kill:.3f} s from the kill, {since_heard:.3f} s unheard; {prefill_s:.3f} s whole"
        )
    # Asking anew takes as long as asking; the rest is what hearing of it took, on machines with much to do.
    assert (since_kill if end == "left" else since_heard - 1.2) < prefill_s + 0.5
