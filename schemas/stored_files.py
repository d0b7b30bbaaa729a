"""Files as the object store has them: names of objects, and what is noted of each file. Pure.

    files/<tenant>/<file_id>.json               what is noted of the file, a `StoredFile`
    files/<tenant>/<file_id>/content            what was uploaded
    batches/<tenant>/<batch_id>/<kind>/<n>-<epoch>.jsonl    part n of a batch's results

A part's name holds the epoch of the coordinator that wrote it: one that was taken over from and does not know
it yet writes where nobody reads. Ids begin with the time, so names sort by it.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from msgspec import Struct

from schemas.records import BatchPart
from schemas.topics import DAY_MS, check_tenant

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
# As in OpenAI's API; a file that says nothing is kept this long.
KEPT_MS = 30 * DAY_MS
MAX_FILE_BYTES = 512 << 20
MAX_FILE_LINES = 100_000
_TIME_DIGITS, _ID_DIGITS = 11, 32

Kind = Literal["output", "error"]


class ObjectPart(Struct, frozen=True):
    """The first `size` bytes of the object `name`."""

    name: str
    size: int


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file: its parts, one after another. Times are ms of the epoch; `bytes` is the sum of the parts.

    `lines` is known of what was uploaded for a batch."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    parts: list[ObjectPart]
    lines: int | None = None


def new_file_id(now_ms: int) -> str:
    return FILE_PREFIX + _time(now_ms) + secrets.token_hex(16)[: _ID_DIGITS - _TIME_DIGITS]


def new_batch_id(now_ms: int) -> str:
    return BATCH_PREFIX + _time(now_ms) + secrets.token_hex(16)[: _ID_DIGITS - _TIME_DIGITS]


def result_file_id(batch_id: str, kind: Kind) -> str:
    """The id of a batch's output or error file: known before there is one."""
    digits = batch_id.removeprefix(BATCH_PREFIX)
    digest = hashlib.blake2b(f"{batch_id}/{kind}".encode(), digest_size=16).hexdigest()
    return FILE_PREFIX + digits[:_TIME_DIGITS] + digest[: _ID_DIGITS - _TIME_DIGITS]


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` can be an id of ours: nothing else becomes part of an object's name."""
    digits = text.removeprefix(prefix)
    return digits != text and len(digits) == _ID_DIGITS and all(c in "0123456789abcdef" for c in digits)


def files_of(tenant: str) -> str:
    """What the names of a tenant's files begin with."""
    return f"files/{check_tenant(tenant)}/"


def noted(tenant: str, file_id: str) -> str:
    return f"{files_of(tenant)}{file_id}.json"


def content(tenant: str, file_id: str) -> str:
    return f"{files_of(tenant)}{file_id}/content"


def part_name(tenant: str, batch_id: str, kind: Kind, number: int, epoch: int) -> str:
    """`number` counts the parts of a kind from 0."""
    return f"batches/{check_tenant(tenant)}/{batch_id}/{kind}/{number:06d}-{epoch}.jsonl"


def object_parts(tenant: str, batch_id: str, kind: Kind, parts: Sequence[BatchPart]) -> list[ObjectPart]:
    """The objects that a batch's state speaks of."""
    return [
        ObjectPart(part_name(tenant, batch_id, kind, number, part.epoch), part.size)
        for number, part in enumerate(parts)
    ]


class ObjectName(NamedTuple):
    """What an object's name says: whose it is and of which file. `role`: its note, what was uploaded, or a
    part of a batch's results. `made_at`: when the file or the batch was asked for (ms of the epoch)."""

    tenant: str
    file_id: str
    role: Literal["note", "content", "part"]
    made_at: int


_ID = "[0-9a-f]{32}"
_OF_FILE = re.compile(rf"files/([a-z0-9-]+)/({FILE_PREFIX}{_ID})(\.json|/content)")
_OF_BATCH = re.compile(rf"batches/([a-z0-9-]+)/({BATCH_PREFIX}{_ID})/(output|error)/[0-9]+-[0-9]+\.jsonl")


def parse_name(name: str) -> ObjectName | None:
    """None for what is no object of ours."""
    if (found := _OF_FILE.fullmatch(name)) is not None:
        tenant, file_id, rest = found.groups()
        role: Literal["note", "content"] = "content" if rest == "/content" else "note"
        return ObjectName(tenant, file_id, role, _made_at(file_id, FILE_PREFIX))
    if (found := _OF_BATCH.fullmatch(name)) is not None:
        tenant, batch_id, kind = found.groups()
        file_id = result_file_id(batch_id, cast("Kind", kind))
        return ObjectName(tenant, file_id, "part", _made_at(batch_id, BATCH_PREFIX))
    return None


def _made_at(text: str, prefix: str) -> int:
    return int(text.removeprefix(prefix)[:_TIME_DIGITS], 16)


def _time(now_ms: int) -> str:
    return f"{now_ms:0{_TIME_DIGITS}x}"
