"""A job's statuses, and that a crash at any step neither loses nor doubles a line."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.api.batches import ENDED
from schemas.codec import decode, encode
from schemas.records import BatchError, BatchJob, BatchState
from schemas.stored_files import Kind, object_parts, part_name
from streams.ledger import job_parts
from streams.ledger.batch_actions import FileAnswer
from streams.ledger.batch_item import FileSource
from streams.ledger.job import _NEXT, FileJob, Status
from streams.ledger.job_lines import LineCutter
from streams.ledger.job_parts import JobParts

HOUR = 3_600_000
JOB = BatchJob("batch_" + "1" * 32, "demo", "openai", "file-x", "/v1/generate", None, HOUR, 1_000)


def make_answer(index: int, code: str | None = None, size: int = 0) -> FileAnswer:
    name = f"n{index}"
    line = json.dumps({"custom_id": name, "pad": "x" * size}).encode() + b"\n"
    source = FileSource("demo", JOB.batch_id, index, name)
    return FileAnswer(source, bytes(16), line, code, 3, 1, 2)


def running(total: int = 4) -> FileJob:
    job = FileJob(JOB, None, 1)
    job.validated(total, 2_000)
    for i in range(total):
        job.take(10 * i, 10 * i + 10)
    return job


def test_the_last_statuses_are_those_that_clients_know_as_such() -> None:
    assert {status for status, after in _NEXT.items() if not after} == ENDED


def test_from_validation_to_completion() -> None:
    job = FileJob(JOB, None, 1)
    assert (job.status, job.expires_at) == (Status.VALIDATING, 1_000 + HOUR)
    job.validated(2, 2_000)
    job.take(0, 10)
    job.take(10, 20)
    job.add([make_answer(0), make_answer(1, "worker_lost")])
    job.transition_to(Status.FINALIZING, 3_000)
    job.finish(4_000)
    state = job.state()
    assert (state.status, state.total, state.completed, state.failed) == ("completed", 2, 1, 1)
    assert (state.in_progress_at, state.finalizing_at, state.ended_at) == (2_000, 3_000, 4_000)
    assert (state.input_tokens, state.cached_tokens, state.output_tokens) == (6, 2, 4)
    assert (state.low_index, state.low_offset, state.ended) == (2, 20, b"")


@pytest.mark.parametrize(
    ("code", "cancelling", "errors", "status"),
    [
        (None, False, [], "completed"),
        ("batch_expired", False, [], "expired"),
        ("batch_cancelled", True, [], "cancelled"),
        ("batch_expired", False, [BatchError("input_file_not_found", "gone")], "failed"),
    ],
)
def test_the_last_status_says_why_it_ended(
    code: str | None, cancelling: bool, errors: list[BatchError], status: str
) -> None:
    job = running(1)
    if cancelling:
        job.transition_to(Status.CANCELLING, 3_000)
    job.add([make_answer(0, code)])
    if not cancelling:
        job.transition_to(Status.FINALIZING, 3_000)
    if errors:
        job.fail(errors, 3_000)
    # A successor knows it from the state alone.
    again = FileJob(JOB, job.state(), 2)
    again.finish(4_000)
    assert again.status == status
    assert again.status in ENDED


def test_a_step_that_is_none_is_refused() -> None:
    job = running()
    with pytest.raises(RuntimeError, match="in_progress to completed"):
        job.transition_to(Status.COMPLETED, 0)


def test_a_line_that_ended_cannot_end_again() -> None:
    job = running()
    job.add([make_answer(2)])
    with pytest.raises(KeyError):
        job.add([make_answer(2)])


def test_a_part_is_written_again_until_it_is_large() -> None:
    parts = JobParts([], 7)
    assert parts.append([b"a\n"]) == [(0, b"a\n")]
    assert parts.append([b"b\n"]) == [(0, b"a\nb\n")]
    large = b"x" * job_parts.PART_BYTES
    assert [write.number for write in parts.append([large, b"c\n"])] == [0, 1]
    assert parts.append([]) == []
    assert [(p.epoch, p.size) for p in parts.parts()] == [(7, len(large) + 4), (7, 2)]
    parts.close()
    assert parts.buffered == 0
    assert [write.number for write in parts.append([b"d\n"])] == [2]


class Store:
    """Objects, and the newest state that was committed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.committed: bytes | None = None

    def state(self) -> BatchState | None:
        if self.committed is None:
            return None
        state = decode(self.committed)
        assert isinstance(state, BatchState)
        return state

    def lines(self, kind: Kind) -> list[Any]:
        """What a reader sees."""
        state = self.state()
        assert state is not None
        parts = state.output if kind == "output" else state.error_output
        data = b"".join(
            self.objects[part.name][: part.size]
            for part in object_parts(state.tenant, state.batch_id, kind, parts)
        )
        return [json.loads(line) for line in data.splitlines()]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), part_bytes=st.sampled_from([60, 300, 5_000]))
def test_a_crash_at_any_step_neither_loses_nor_doubles_a_line(seed: int, count: int, part_bytes: int) -> None:
    """Lives read, end lines in any order, flush, and die between any two steps; what a dead one had begun to
    write may still arrive later."""
    rng = random.Random(seed)
    content = b"".join(b"%d%s\n" % (i, b" " * rng.randrange(9)) for i in range(count))
    store = Store()
    codes = [rng.choice([None, None, "worker_lost", "batch_expired"]) for _ in range(count)]
    late: list[tuple[str, bytes]] = []
    small, job_parts.PART_BYTES = job_parts.PART_BYTES, part_bytes
    try:
        for epoch in range(1, 400):
            job = FileJob(JOB, store.state(), epoch)
            if job.status is Status.VALIDATING:
                job.validated(count, 2_000)
                store.committed = encode(job.state())
            lines = LineCutter(job.next_offset)
            unread = lines.push(content[job.next_offset :])
            waiting: list[int] = []
            while rng.random() > 0.1:
                if late and rng.random() < 0.3:
                    name, data = late.pop()
                    store.objects[name] = data
                for _ in range(rng.randrange(5)):
                    if job.read_out:
                        break
                    line = unread.pop(0)
                    before = job.next_index
                    assert line.data is not None
                    assert int(line.data) == before  # a successor reads where it should
                    index = job.take(line.offset, line.end)
                    if index is not None:
                        waiting.append(index)
                rng.shuffle(waiting)
                ended = [waiting.pop() for _ in range(rng.randrange(len(waiting) + 1))]
                writes = job.add(make_answer(i, codes[i], rng.randrange(60)) for i in ended)
                dies_at = rng.randrange(len(writes) + 8)
                named = [(part_name("demo", JOB.batch_id, k, w.number, epoch), w.data) for k, w in writes]
                if dies_at <= len(writes):
                    store.objects.update(named[:dies_at])
                    late += named[dies_at : dies_at + 1]
                    break
                store.objects.update(named)
                store.committed = encode(job.state())
                state = job.state()
                assert len(store.lines("output")) == state.completed
                if rng.random() < 0.1:
                    job.close_parts()
            done = store.state()
            assert done is not None
            if done.completed + done.failed + done.expired == count:
                break
        else:
            pytest.fail("it never ended")
        store.objects.update(late)
        output, errors = store.lines("output"), store.lines("error")
        assert Counter(line["custom_id"] for line in output) == Counter(
            f"n{i}" for i, code in enumerate(codes) if code is None
        )
        assert Counter(line["custom_id"] for line in errors) == Counter(
            f"n{i}" for i, code in enumerate(codes) if code is not None
        )
        assert (done.failed, done.expired) == (codes.count("worker_lost"), codes.count("batch_expired"))
        assert done.output_tokens == 2 * count
        last = FileJob(JOB, done, 1_000)
        assert last.read_out or last.take(last.next_offset, last.next_offset) is None
    finally:
        job_parts.PART_BYTES = small
