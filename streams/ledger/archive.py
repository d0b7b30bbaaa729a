"""What inference.usage leaves in the object store: names, cuts and bytes of its parts. Pure.

    usage/<partition>/<first offset>-<last offset>.avro

A part is an Avro object container of `ArchivedRecord`: the records as the broker had them, with the schemas
that they were written with, so that a reader needs nothing else. Where a part ends follows from where it
begins and from the records alone: written again, by whomever, it has the same name and the same bytes.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import fastavro

from schemas import topics
from schemas.topics import DAY_MS

PREFIX = "usage"
RECORDS_A_PART = 50_000
_DIGITS = 20
_NAME = re.compile(rf"{PREFIX}/(0|[1-9][0-9]*)/([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})\.avro")
_SCHEMAS = "headrace.schemas"
_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "ArchivedRecord",
    "namespace": "headrace",
    "doc": f"A record of {topics.USAGE}.",
    "fields": [
        {"name": "offset", "type": "long"},
        {"name": "appended_at", "type": "long", "doc": "The broker's time (ms of the epoch)."},
        {"name": "value", "type": "bytes", "doc": f"Single-object Avro; its schema is in {_SCHEMAS}."},
    ],
}
_PARSED = fastavro.parse_schema(_SCHEMA)


class ArchiveError(ValueError):
    """An object of the archive cannot be read; the message names it."""


class ArchivedRecord(NamedTuple):
    offset: int
    appended_at: int
    value: bytes


class Part(NamedTuple):
    """Both offsets are included."""

    partition: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{PREFIX}/{self.partition}/{self.first:0{_DIGITS}d}-{self.last:0{_DIGITS}d}.avro"


def parse_part(name: str) -> Part | None:
    """None for what is no object of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else Part(*map(int, found.groups()))


def next_offset(parts: Iterable[Part]) -> int:
    """Where the archive of a partition goes on."""
    return max((part.last + 1 for part in parts), default=0)


def day_begin(now_ms: int) -> int:
    """The midnight (UTC) before: what lies before it is archived."""
    return now_ms - now_ms % DAY_MS


class Cutter:
    """Parts of one partition, from its records in order: each of one day (UTC), and not too long."""

    def __init__(self, records_a_part: int = RECORDS_A_PART) -> None:
        self._most = records_a_part
        self._records: list[ArchivedRecord] = []

    def add(self, records: Iterable[ArchivedRecord]) -> Iterator[list[ArchivedRecord]]:
        """The parts that these complete."""
        for record in records:
            if self._records and (
                len(self._records) == self._most
                or record.appended_at // DAY_MS != self._records[0].appended_at // DAY_MS
            ):
                yield self._records
                self._records = []
            self._records.append(record)

    def rest(self) -> list[ArchivedRecord]:
        """What is left when a day is over: it can grow no more."""
        return self._records


def part_of(partition: int, records: Sequence[ArchivedRecord]) -> Part:
    return Part(partition, records[0].offset, records[-1].offset)


def encode_part(
    part: Part, records: Sequence[ArchivedRecord], schema_of: Callable[[bytes], str | None]
) -> bytes:
    """`schema_of` gives the schema that a value was written with, None where it is not known."""
    schemas = sorted({schema for record in records if (schema := schema_of(record.value)) is not None})
    out = io.BytesIO()
    fastavro.writer(
        out,
        _PARSED,
        (record._asdict() for record in records),
        codec="deflate",
        metadata={_SCHEMAS: json.dumps(schemas)},
        # Not at random, or no two would be equal.
        sync_marker=hashlib.blake2b(part.name.encode(), digest_size=16).digest(),
    )
    return out.getvalue()


def decode_part(part: Part, data: bytes) -> tuple[list[ArchivedRecord], list[str]]:
    """The records, and the schemas of their values. Raises ArchiveError."""
    try:
        reader = fastavro.reader(io.BytesIO(data))
        records = [ArchivedRecord(**cast("dict[str, Any]", record)) for record in reader]
        schemas = json.loads(reader.metadata[_SCHEMAS])
    except Exception as e:  # fastavro raises many kinds on broken bytes
        raise ArchiveError(f"{part.name} is broken: {type(e).__name__}: {e}") from e
    if not records or part_of(part.partition, records) != part:
        raise ArchiveError(f"{part.name} holds other offsets than its name says")
    return records, schemas
