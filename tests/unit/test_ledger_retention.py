"""What may be taken out of the object store, and what its names say."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.stored_files import (
    ObjectName,
    ObjectPart,
    StoredFile,
    content,
    new_batch_id,
    new_file_id,
    noted,
    parse_name,
    part_name,
    result_file_id,
)
from schemas.topics import DAY_MS
from streams.ledger.retention import LONGEST_BATCH_MS, UNNOTED_MS, has_expired, is_orphan, may_be_orphan

NOW = 1_800_000_000_000
MADE = NOW - 3 * DAY_MS
BATCH = f"batch_{MADE:011x}" + "b" * 21
OUTPUT = result_file_id(BATCH, "output")
OF_FILE = f"file-{MADE:011x}" + "f" * 21


def file(*names: str, expires_at: int = NOW + 1) -> StoredFile:
    return StoredFile(
        id=OF_FILE,
        tenant="acme",
        filename="a",
        purpose="batch",
        bytes=len(names),
        created_at=MADE,
        expires_at=expires_at,
        parts=[ObjectPart(name, 1) for name in names],
    )


@given(st.integers(0, 16**11 - 1))
def test_names_say_what_they_were_made_of(now: int) -> None:
    file_id, batch_id = new_file_id(now), new_batch_id(now)
    assert parse_name(noted("acme", file_id)) == ObjectName("acme", file_id, "note", now)
    assert parse_name(content("a-1", file_id)) == ObjectName("a-1", file_id, "content", now)
    error_id = result_file_id(batch_id, "error")
    assert parse_name(part_name("acme", batch_id, "error", 3, 7)) == ObjectName("acme", error_id, "part", now)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "files/acme",
        f"files/acme/{OF_FILE}",
        f"files/acme/{OF_FILE}/content/more",
        f"files/acme/{BATCH}.json",
        f"files/acme/{OF_FILE}.json\n",
        f"batches/acme/{BATCH}/other/000000-1.jsonl",
        f"batches/acme/{BATCH}/output/000000-1.jsonl.tmp",
        f"elsewhere/files/acme/{OF_FILE}.json",
    ],
)
def test_what_is_not_ours_is_left_alone(name: str) -> None:
    assert parse_name(name) is None


def test_a_file_ends_when_its_note_says_so() -> None:
    assert not has_expired(file(expires_at=NOW + 1), NOW)
    assert has_expired(file(expires_at=NOW), NOW)


@dataclass
class Case:
    name: str
    path: str
    age_ms: int
    note: StoredFile | None
    swept: bool
    now: int = NOW


PART, OTHER_LIFE = part_name("acme", BATCH, "output", 0, 7), part_name("acme", BATCH, "output", 0, 6)
CONTENT, NOTE = content("acme", OF_FILE), noted("acme", OF_FILE)
CASES = [
    Case("a note is judged by what it says alone", NOTE, 99 * DAY_MS, None, False),
    Case("an upload that runs yet", CONTENT, UNNOTED_MS - 1, None, False),
    Case("an upload that never ended", CONTENT, UNNOTED_MS, None, True),
    Case("a file's bytes", CONTENT, 20 * DAY_MS, file(CONTENT), False),
    Case("a part of a batch that may run yet", PART, 2 * DAY_MS, None, False),
    Case("a part of a batch that no longer can", PART, DAY_MS, None, True, now=MADE + LONGEST_BATCH_MS),
    Case("a part of a batch's output", PART, 9 * DAY_MS, file(PART), False),
    Case("a part of a life that was taken over from", OTHER_LIFE, DAY_MS, file(PART), True),
    Case("one that is written this minute", OTHER_LIFE, 1, file(PART), False),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_nobody_needs_is_swept(case: Case) -> None:
    name = parse_name(case.path)
    assert name is not None
    old = may_be_orphan(name, case.now - case.age_ms, case.now)
    assert (old and is_orphan(name, case.path, case.note, case.now)) == case.swept
