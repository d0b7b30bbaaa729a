"""Lines of a job's input file: cut from what is read of it, checked, and made into requests. Pure.

What is wrong with a file as such fails the job before anything runs: a line that is no JSON object, that has
no custom_id or one that stands twice, that is for another url. What the API would refuse of a body is that
line's own error, told when its turn comes.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from schemas.api.batches import LINE_BODIES
from schemas.api.errors import ApiError, bad_field
from schemas.api.prepare import GENERATE_URL
from schemas.models import LoadedModel
from schemas.records import BatchError, BatchJob, Tenant
from schemas.stored_files import MAX_FILE_LINES
from streams.ledger.batch_item import BatchItem, FileSource, check_custom_id, make_item
from streams.ledger.file_lines import item_request_id

MAX_LINE_BYTES = 8 << 20
MAX_ERRORS = 100
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """From `offset` to `end` in the file, its newline among it; `number` counts from where the cutter began,
    from 1. `data` is None where it is too long."""

    number: int
    offset: int
    end: int
    data: bytes | None


class LineCutter:
    """Fed with a file from `offset` on; lines of blanks are none."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._number = 0
        self._begun = b""
        self._skipped = 0

    def push(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        *whole, rest = (self._begun + data).split(b"\n")
        lines = []
        for text in whole:
            lines += self._line(text, len(text) + 1)
        self._begun = rest
        if len(rest) > MAX_LINE_BYTES:
            self._skipped += len(rest)
            self._begun = b""
        return lines

    def end(self) -> list[Line]:
        """The last one, if no newline ends it."""
        text, self._begun = self._begun, b""
        return self._line(text, len(text))

    def _line(self, text: bytes, size: int) -> list[Line]:
        offset = self._offset
        end = self._offset = offset + self._skipped + size
        too_long = bool(self._skipped) or size > MAX_LINE_BYTES
        self._skipped = 0
        self._number += 1
        if too_long:
            return [Line(self._number, offset, end, None)]
        if offset == 0:
            text = text.removeprefix(_BOM)
        return [Line(self._number, offset, end, text)] if text.strip() else []


class LineCheck:
    """`total` lines so far, and the first of what is wrong with them."""

    def __init__(self, job: BatchJob) -> None:
        self.total = 0
        self.errors: list[BatchError] = []
        self._endpoint = job.endpoint
        self._seen: set[bytes] = set()

    def take(self, lines: list[Line]) -> bool:
        """False when no more need be read: enough is wrong."""
        for line in lines:
            self.total += 1
            if self.total > MAX_FILE_LINES:
                message = f"the file has more than {MAX_FILE_LINES} lines"
                self.errors.append(BatchError("too_many_lines", message, line.number))
                return False
            try:
                self._check(line)
            except ApiError as e:
                self.errors.append(BatchError(e.code, e.message, line.number, e.param))
            if len(self.errors) >= MAX_ERRORS:
                return False
        return True

    def end(self) -> None:
        """The file has no more."""
        if not self.total:
            self.errors.append(BatchError("empty_file", "the file has no lines"))

    def _check(self, line: Line) -> None:
        fields = line_fields(line)
        custom_id = check_custom_id(fields.get("custom_id"))
        # As little of each as tells them apart: 100,000 names may have 50 MB.
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        if digest in self._seen:
            message = f"custom_id: {custom_id[:100]!r} stands on an earlier line too"
            raise ApiError(400, "duplicate_custom_id", message, "custom_id")
        self._seen.add(digest)
        _url(fields, self._endpoint)


class BadLine(NamedTuple):
    """A line that is answered with an error."""

    source: FileSource
    request_id: bytes
    error: ApiError

    def request_ids(self) -> list[bytes]:
        """The one that it would be, as far as anybody knows."""
        return [self.request_id]


def line_fields(line: Line) -> dict[str, Any]:
    """Raises ApiError."""
    if line.data is None:
        raise ApiError(400, "line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        fields = msgspec.json.decode(line.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, "invalid_json", f"the line is not valid JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the line is not a JSON object")
    return fields


def source_of(job: BatchJob, index: int, line: Line) -> FileSource:
    """Of a line that was checked. Raises ApiError where it is not the one that was."""
    return FileSource(job.tenant, job.batch_id, index, check_custom_id(line_fields(line).get("custom_id")))


def read_line(
    job: BatchJob, index: int, line: Line, models: Mapping[str, LoadedModel], rules: Tenant | None
) -> BatchItem | BadLine:
    """Of a line that was checked. Tokenizes: run it in a thread. Raises ApiError where it is not the one
    that was checked; whatever else the tenant may have written is a BadLine."""
    fields = line_fields(line)
    source = FileSource(job.tenant, job.batch_id, index, check_custom_id(fields.get("custom_id")))
    request_id = item_request_id(job.batch_id, index)
    try:
        url = _url(fields, job.endpoint)
        body = _body(fields)
        if job.model is not None and isinstance(body, dict):
            body.setdefault("model", job.model)
        accepted_at, end_ms = job.created_at, job.completion_window_ms
        return make_item(source, request_id, accepted_at, url, body, models, rules, end_ms)
    except ApiError as e:
        return BadLine(source, request_id, e)


def _url(fields: dict[str, Any], endpoint: str | None) -> str:
    if not fields.keys() & {"url", "body", "method"}:
        # A body of /v1/generate with a custom_id.
        if endpoint not in (None, GENERATE_URL):
            raise ApiError(400, "missing_field", "url: this field is required", "url")
        return GENERATE_URL
    if "url" not in fields:
        raise ApiError(400, "missing_field", "url: this field is required", "url")
    if fields.get("method", "POST") != "POST":
        raise bad_field("method", "must be POST")
    url = fields["url"]
    if not isinstance(url, str) or url not in LINE_BODIES:
        raise bad_field("url", f"use one of {', '.join(LINE_BODIES)}")
    if endpoint not in (None, url):
        raise bad_field("url", f"the batch is for {endpoint}, this line for {url}")
    return url


def _body(fields: dict[str, Any]) -> Any:
    if not fields.keys() & {"url", "body", "method"}:
        return {name: value for name, value in fields.items() if name != "custom_id"}
    if unknown := sorted(fields.keys() - _LINE_FIELDS):
        raise ApiError(400, "unknown_field", f"{unknown[0]}: this field is not supported", unknown[0])
    if "body" not in fields:
        raise ApiError(400, "missing_field", "body: this field is required", "body")
    return fields["body"]
