"""What a gateway knows of batches from the records of both topics, in whatever order they come."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch_book import BatchBook
from schemas.records import BatchCancel, BatchJob, BatchPart, BatchState
from schemas.stored_files import part_name, result_file_id
from schemas.topics import BATCHES_RETENTION_MS

NOW = 1_780_000_000_000
BATCH_ID = "batch_" + f"{NOW:011x}" + "0" * 21
JOB = BatchJob(BATCH_ID, "demo", "openai", "file-a", "/v1/chat/completions", None, 86_400_000, NOW)
RUNNING = BatchState(
    BATCH_ID,
    "demo",
    "in_progress",
    NOW + 86_400_000,
    total=4,
    completed=2,
    in_progress_at=NOW + 5,
    output=[BatchPart(7, 100), BatchPart(9, 50)],
    ended=b"\x05",
)
ENDED = replace(RUNNING, status="completed", completed=4, ended=b"", ended_at=NOW + 900)
CANCEL = BatchCancel(BATCH_ID, "demo", NOW + 50)


def book(*records: Any) -> BatchBook:
    made = BatchBook()
    for record in records:
        (made.on_state if isinstance(record, BatchState) else made.on_job)(record)
    return made


@given(st.permutations([("job", JOB), ("state", RUNNING), ("state", ENDED)]))
def test_the_topics_may_be_read_at_different_speeds(order: list[tuple[str, Any]]) -> None:
    states = iter([RUNNING, ENDED])  # of one topic the order is kept
    made = book(*(JOB if kind == "job" else next(states) for kind, _ in order))
    batch = made.get("demo", BATCH_ID)
    assert batch is not None
    assert batch.state == ENDED
    assert batch.ended
    assert made.user_of("demo", "file-a") is None


def test_a_bitmap_is_not_kept() -> None:
    batch = book(JOB, RUNNING).get("demo", BATCH_ID)
    assert batch is not None
    assert batch.state is not None
    assert batch.state.ended == b""


def test_a_file_is_in_use_until_its_batch_has_ended() -> None:
    assert book(JOB).user_of("demo", "file-a") == BATCH_ID
    assert book(JOB, RUNNING).user_of("demo", "file-a") == BATCH_ID
    assert book(JOB, RUNNING).user_of("demo", "file-b") is None
    assert book(JOB, RUNNING).user_of("other", "file-a") is None
    assert book(JOB, ENDED).user_of("demo", "file-a") is None
    output = result_file_id(BATCH_ID, "output")
    assert book(JOB, RUNNING).user_of("demo", output) == BATCH_ID
    assert book(JOB, ENDED).user_of("demo", output) is None


def test_a_result_file_grows_with_the_state() -> None:
    file_id = result_file_id(BATCH_ID, "output")
    assert book(JOB).result_file("demo", file_id) is None
    file = book(JOB, RUNNING).result_file("demo", file_id)
    assert file is not None
    assert file.bytes == 150
    assert [(part.name, part.size) for part in file.parts] == [
        (part_name("demo", BATCH_ID, "output", 0, 7), 100),
        (part_name("demo", BATCH_ID, "output", 1, 9), 50),
    ]
    assert book(JOB, RUNNING).result_file("demo", result_file_id(BATCH_ID, "error")) is None
    assert book(JOB, RUNNING).result_file("other", file_id) is None


def test_a_cancel_is_known_once() -> None:
    batch = book(JOB, CANCEL, replace(CANCEL, asked_at=NOW + 99)).get("demo", BATCH_ID)
    assert batch is not None
    assert batch.cancel_asked_at == NOW + 50


def test_the_newest_come_first() -> None:
    later = replace(JOB, batch_id="batch_" + f"{NOW + 1:011x}" + "0" * 21)
    assert [b.job.batch_id for b in book(JOB, later).newest_first("demo")] == [later.batch_id, BATCH_ID]
    assert list(book(JOB).newest_first("other")) == []


@pytest.mark.parametrize("by", ["deletion", "age"])
def test_what_is_gone_leaves_nothing(by: str) -> None:
    made = book(JOB, RUNNING)
    if by == "deletion":
        made.on_deleted(BATCH_ID)
    else:
        made.forget(NOW + BATCHES_RETENTION_MS)
        assert made.get("demo", BATCH_ID) is not None
        made.forget(NOW + BATCHES_RETENTION_MS + 1)
    assert made.get("demo", BATCH_ID) is None
    assert made.user_of("demo", "file-a") is None
    assert made.result_file("demo", result_file_id(BATCH_ID, "output")) is None
