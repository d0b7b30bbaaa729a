"""The archive of usage: names, cuts and bytes."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Codec, encode
from schemas.records import Usage
from schemas.topics import DAY_MS
from streams.ledger.archive import (
    ArchivedRecord,
    ArchiveError,
    Cutter,
    Part,
    day_begin,
    decode_part,
    encode_part,
    next_offset,
    parse_part,
    part_of,
)

NOW = 1_764_446_000_123
USAGE = Usage(bytes(16), 1, False, "demo", 2, "m", 10, 0, 5, "stop", NOW, NOW + 1, 0, 7)


def test_a_name_is_a_part_and_sorts_by_offset() -> None:
    part = Part(11, 99, 100_000)
    assert part.name == "usage/11/00000000000000000099-00000000000000100000.avro"
    assert parse_part(part.name) == part
    assert Part(11, 9, 10).name < Part(11, 10, 11).name
    for other in ("usage/11/99-100000.avro", "usage/011/" + part.name[9:], "files/a", part.name + "#1"):
        assert parse_part(other) is None


def test_the_archive_goes_on_behind_its_last_part() -> None:
    assert next_offset([]) == 0
    assert next_offset([Part(0, 0, 9), Part(0, 10, 19), Part(0, 10, 14)]) == 20


def test_a_day_ends_at_midnight_utc() -> None:
    assert day_begin(3 * DAY_MS) == day_begin(4 * DAY_MS - 1) == 3 * DAY_MS


def cut(records: list[ArchivedRecord], most: int, sizes: list[int]) -> list[list[ArchivedRecord]]:
    """`sizes`: how many are fed at a time."""
    cutter, parts, begin = Cutter(most), [], 0
    for size in [*sizes, len(records)]:
        parts += list(cutter.add(records[begin : begin + size]))
        begin += size
    return [part for part in [*parts, cutter.rest()] if part]


@given(
    days=st.lists(st.integers(0, 4), max_size=40),
    most=st.integers(1, 7),
    sizes=st.lists(st.integers(0, 9), max_size=9),
    data=st.data(),
)
def test_cuts_follow_from_the_records_however_they_are_read(
    days: list[int], most: int, sizes: list[int], data: st.DataObject
) -> None:
    times = sorted(day * DAY_MS + 5 for day in days)
    records = [ArchivedRecord(offset, time, b"x") for offset, time in enumerate(times)]
    parts = cut(records, most, sizes)
    assert [record for part in parts for record in part] == records
    for part in parts:
        assert len(part) <= most
        assert len({record.appended_at // DAY_MS for record in part}) == 1
    # One who begins behind any part, and sees only whole days, cuts the rest alike.
    until = data.draw(st.integers(0, 5)) * DAY_MS
    seen = [record for record in records if record.appended_at < until]
    first = cut(seen, most, [])
    done = sum(map(len, first))
    assert [*first, *cut(records[done:], most, sizes)] == parts


def test_a_part_gives_back_what_it_was_given_and_its_bytes_do_not_change() -> None:
    rng = random.Random(1)
    usage = encode(USAGE)
    old = {
        "type": "record",
        "name": "Usage",
        "namespace": "headrace",
        "fields": [{"name": "tenant", "type": "string"}],
    }
    writer = Codec()
    writer.learn(json.dumps(old))
    # A writer's older schema, a record nobody knows, an empty one.
    older = next(prefix for prefix in writer._readers if writer._readers[prefix][2] is not None) + b"\x08demo"
    values = [usage, older, b"garbage", b"", rng.randbytes(100)]
    records = [ArchivedRecord(10 + 2 * i, NOW + i, value) for i, value in enumerate(values)]
    part = part_of(3, records)
    assert part == Part(3, 10, 18)
    data = encode_part(part, records, writer.schema_of)
    assert data == encode_part(part, records, writer.schema_of)
    found, schemas = decode_part(part, data)
    assert found == records
    assert len(schemas) == 2
    # Who reads knows no more than its own schemas and what the part tells.
    reader = Codec()
    assert reader.schema_of(older) is None
    for schema in schemas:
        reader.learn(schema)
    assert reader.decode(found[0].value) == USAGE
    assert reader.schema_of(older) == writer.schema_of(older)


def test_a_broken_part_is_named() -> None:
    records = [ArchivedRecord(5, NOW, b"x")]
    part = part_of(0, records)
    data = encode_part(part, records, lambda value: None)
    with pytest.raises(ArchiveError, match=part.name):
        decode_part(part, data[:-9])
    with pytest.raises(ArchiveError, match=r"0006\.avro holds other offsets"):
        decode_part(Part(0, 5, 6), data)
