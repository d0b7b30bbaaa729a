"""The form that a file is uploaded in (RFC 7578), read piece by piece. Pure.

The file's bytes are given out as they come; nothing is kept but the last field and a few counts.
"""

from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from schemas.api.batches import PURPOSE
from schemas.api.errors import ApiError, bad_field

# OpenAI's bounds of expires_after.
MIN_EXPIRES_S, MAX_EXPIRES_S = 3_600, 30 * 86_400
_FILE = "file"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)
_MAX_FIELD, _MAX_FILENAME = 200, 255
# Far more than a form has parts. The parser is slow at what only begins like a boundary, which no part may
# contain (RFC 2046, 5.1.1): 10 ms for 64 KiB of it.
_MAX_BOUNDARIES = 16
_AS_IT_IS = frozenset({"", "7bit", "8bit", "binary"})
# What a form has beside the file: far more than its fields and headers can be.
FORM_BYTES = 65_536


class FormFile(NamedTuple):
    """What the form says of its file. `expires_after_s`: None where it says nothing."""

    filename: str
    bytes: int
    lines: int
    expires_after_s: int | None


class FileForm:
    """`feed` the body, then `finish`. Both raise ApiError, as does a Content-Type that is no form's."""

    def __init__(self, content_type: bytes, max_bytes: int, max_lines: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            message = "Content-Type: a file is sent as multipart/form-data"
            raise ApiError(415, "unsupported_media_type", message, "Content-Type")
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise _broken("its Content-Type has no boundary")
        self._delimiter, self._boundaries = b"\r\n--" + boundary, 0
        self._max_bytes, self._max_lines = max_bytes, max_lines
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._read = self._bytes = self._newlines = 0
        self._last = b"\n"
        self._pieces: list[bytes] = []
        self._ended = False
        # Of the part that is being read.
        self._headers: dict[str, bytes] = {}
        self._header, self._header_value, self._value = b"", b"", b""
        self._name = ""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise _broken("its boundary is too long") from None

    def feed(self, piece: bytes) -> list[bytes]:
        """What of the file is in the next piece of the body."""
        self._boundaries += piece.count(self._delimiter)
        if self._boundaries > _MAX_BOUNDARIES:
            raise _broken("its boundary is all over it")
        try:
            self._parser.write(piece)
        except FormParserError as e:
            raise _broken(str(e)) from None
        self._read += len(piece)
        if self._read - self._bytes > FORM_BYTES:
            raise _broken(f"it has more than {FORM_BYTES} bytes beside the file's")
        found, self._pieces = self._pieces, []
        return found

    def finish(self) -> FormFile:
        """After the whole body."""
        if not self._ended:
            raise _broken("it ends before its last boundary")
        if self._filename is None:
            raise ApiError(400, "missing_field", "file: this field is required", _FILE)
        if "purpose" not in self._fields:
            raise ApiError(400, "missing_field", "purpose: this field is required", "purpose")
        if not self._bytes:
            raise bad_field(_FILE, "it is empty")
        return FormFile(self._filename, self._bytes, self._lines, self._expires_after())

    @property
    def _lines(self) -> int:
        return self._newlines + (self._last != b"\n")

    def _expires_after(self) -> int | None:
        anchor, seconds = self._fields.get(_ANCHOR), self._fields.get(_SECONDS)
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise bad_field(_ANCHOR, "must be created_at")
        if seconds is None:
            raise ApiError(400, "missing_field", f"{_SECONDS}: this field is required", _SECONDS)
        if not (seconds.isascii() and seconds.isdigit() and MIN_EXPIRES_S <= int(seconds) <= MAX_EXPIRES_S):
            raise bad_field(_SECONDS, f"an integer from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}")
        return int(seconds)

    # The parser's callbacks

    def _on_part_begin(self) -> None:
        self._headers, self._value = {}, b""
        self._header = self._header_value = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = self._header_value
        self._header = self._header_value = b""

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get("content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part has no Content-Disposition with a name")
        self._name = name = options[b"name"].decode("utf-8", "replace")
        if name not in (_FILE, *_FIELDS):
            raise ApiError(400, "unknown_field", f"{name[:80]}: this is not supported", name)
        if name in self._fields or (name == _FILE and self._filename is not None):
            raise bad_field(name, "it is there twice")
        encoding = self._headers.get("content-transfer-encoding", b"").decode("latin-1").lower()
        if encoding not in _AS_IT_IS:
            raise bad_field(name, f"Content-Transfer-Encoding: {encoding[:40]} is not taken")
        if name != _FILE:
            return
        filename = options.get(b"filename", b"").decode("utf-8", "replace")
        if not filename:
            raise bad_field(_FILE, "it needs a filename")
        if len(filename) > _MAX_FILENAME:
            raise bad_field(_FILE, f"its filename is longer than {_MAX_FILENAME} characters")
        self._filename = filename

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._name != _FILE:
            self._value += piece
            if len(self._value) > _MAX_FIELD:
                raise bad_field(self._name, f"it is longer than {_MAX_FIELD} bytes")
            return
        self._bytes += len(piece)
        if self._bytes > self._max_bytes:
            message = f"file: it is larger than {self._max_bytes} bytes"
            raise ApiError(413, "body_too_large", message, _FILE)
        self._newlines += piece.count(b"\n")
        self._last = piece[-1:]
        if self._lines > self._max_lines:
            message = f"file: it has more than {self._max_lines} lines"
            raise ApiError(400, "too_many_lines", message, _FILE)
        self._pieces.append(piece)

    def _on_part_end(self) -> None:
        if self._name == _FILE:
            return
        self._fields[self._name] = value = self._value.decode("utf-8", "replace")
        if self._name == "purpose" and value != PURPOSE:
            raise bad_field("purpose", f"{PURPOSE} is what files are kept for here, not {value[:40]!r}")

    def _on_end(self) -> None:
        self._ended = True


def _broken(why: str) -> ApiError:
    return ApiError(400, "invalid_multipart", f"the body is no multipart form: {why}")
