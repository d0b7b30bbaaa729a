"""The form of an upload, cut anywhere."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.file_form import FileForm, FormFile
from schemas.api.errors import ApiError

TYPE = b"multipart/form-data; boundary=cut"


def part(name: str, content: bytes, *lines: str, filename: str | None = None) -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"'
    if filename is not None:
        disposition += f'; filename="{filename}"'
    return "".join(f"{line}\r\n" for line in (disposition, *lines, "")).encode() + content


def form(*parts: bytes) -> bytes:
    return b"".join(b"--cut\r\n" + each + b"\r\n" for each in parts) + b"--cut--\r\n"


PURPOSE = part("purpose", b"batch")


def file(content: bytes = b"{}\n") -> bytes:
    return part("file", content, "Content-Type: application/octet-stream", filename="a.jsonl")


def read(
    pieces: Iterable[bytes], max_bytes: int = 10_000, max_lines: int = 10, content_type: bytes = TYPE
) -> tuple[bytes, FormFile]:
    reading = FileForm(content_type, max_bytes, max_lines)
    found = [each for piece in pieces for each in reading.feed(piece)]
    return b"".join(found), reading.finish()


def refusal(body: bytes, **options: int | bytes) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as raised:
        read([body], **options)  # type: ignore[arg-type]
    return raised.value.status, raised.value.code, raised.value.param


# What a boundary begins with, and what ends a line.
CONTENTS = st.lists(
    st.sampled_from([b"\r\n--cut", b"\r\n--cu", b"--cut--", b"\r", b"\n", b"-", b"{}", b"\0\xff"]),
    max_size=12,
).map(b"".join)


@given(CONTENTS, st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_bytes_are_exact_wherever_the_body_is_cut(content: bytes, cuts: list[int], last: bool) -> None:
    # What is a boundary ends the part: that is no content.
    content = content.replace(b"\r\n--cut\r\n", b"").replace(b"\r\n--cut--", b"") + b"x"
    if b"\r\n--cut" in content:
        content = content.replace(b"\r\n--cut", b"\r\n--cux")
    body = form(*([PURPOSE, file(content)] if last else [file(content), PURPOSE]))
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    found, said = read((body[a:b] for a, b in pairwise(places)), max_lines=1_000)
    assert found == content
    assert said == FormFile("a.jsonl", len(content), content.count(b"\n") + 1, None)


@pytest.mark.parametrize(("content", "lines"), [(b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
def test_lines_are_counted_whether_the_last_one_ends_or_not(content: bytes, lines: int) -> None:
    assert read([form(PURPOSE, file(content))])[1].lines == lines


def test_as_many_bytes_and_lines_as_may_be_and_no_more() -> None:
    assert read([form(PURPOSE, file(b"1\n2\n3"))], max_bytes=5, max_lines=3)[1].bytes == 5
    assert refusal(form(PURPOSE, file(b"1\n2\n33")), max_bytes=5) == (413, "body_too_large", "file")
    assert refusal(form(PURPOSE, file(b"1\n2\n3\n4")), max_lines=3) == (400, "too_many_lines", "file")


def test_a_limit_is_told_in_the_middle_of_the_file() -> None:
    reading = FileForm(TYPE, 10, 10)
    reading.feed(b"--cut\r\n" + file(b"1234567890"))
    with pytest.raises(ApiError, match="larger than 10 bytes"):
        reading.feed(b"1" + b"x" * 100)


def test_how_long_it_is_kept() -> None:
    fields = (part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"3600"))
    assert read([form(*fields, PURPOSE, file())])[1].expires_after_s == 3600


@pytest.mark.parametrize(
    ("parts", "code", "param"),
    [
        ([PURPOSE], "missing_field", "file"),
        ([file()], "missing_field", "purpose"),
        ([part("purpose", b"assistants"), file()], "invalid_value", "purpose"),
        ([file(), part("purpose", b"vision")], "invalid_value", "purpose"),
        ([part("purpose", b"x" * 201), file()], "invalid_value", "purpose"),
        ([PURPOSE, PURPOSE, file()], "invalid_value", "purpose"),
        ([PURPOSE, file(), file()], "invalid_value", "file"),
        ([PURPOSE, file(b"")], "invalid_value", "file"),
        ([PURPOSE, part("file", b"{}")], "invalid_value", "file"),
        ([PURPOSE, part("file", b"{}", filename="x" * 256)], "invalid_value", "file"),
        (
            [PURPOSE, part("file", b"e30=", "Content-Transfer-Encoding: base64", filename="a")],
            "invalid_value",
            "file",
        ),
        ([PURPOSE, file(), part("model", b"x")], "unknown_field", "model"),
        ([part("expires_after[anchor]", b"now"), PURPOSE, file()], "invalid_value", "expires_after[anchor]"),
        (
            [part("expires_after[seconds]", b"3600"), PURPOSE, file()],
            "invalid_value",
            "expires_after[anchor]",
        ),
        (
            [part("expires_after[anchor]", b"created_at"), PURPOSE, file()],
            "missing_field",
            "expires_after[seconds]",
        ),
        *(
            (
                [
                    part("expires_after[anchor]", b"created_at"),
                    part("expires_after[seconds]", seconds),
                    PURPOSE,
                    file(),
                ],
                "invalid_value",
                "expires_after[seconds]",
            )
            for seconds in (b"3599", b"2592001", b"-1", b"1e4", b"", "٣٦٠٠".encode(), b"9" * 200)
        ),
        ([b"X: y\r\n\r\nz"], "invalid_multipart", None),
        ([b"Content-Disposition: attachment; name=file\r\n\r\nz"], "invalid_multipart", None),
    ],
)
def test_what_does_not_fit_is_named(parts: list[bytes], code: str, param: str | None) -> None:
    assert refusal(form(*parts)) == (400, code, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"--other\r\n", form(PURPOSE, file())[:-6], b"--cut\r\n" + b"X" * 9_000, b"--cut\r\n:\r\n"],
)
def test_what_is_no_form(body: bytes) -> None:
    assert refusal(body)[:2] == (400, "invalid_multipart")


def test_what_begins_like_a_boundary_again_and_again_is_not_read() -> None:
    assert refusal(form(PURPOSE, file(b"\r\n--cutx" * 20))) == (400, "invalid_multipart", None)
    assert refusal(b"--cut" + b" " * 65_536)[:2] == (400, "invalid_multipart")
    assert refusal(form(PURPOSE, file()) + b"x" * 65_536)[:2] == (400, "invalid_multipart")
    assert read([form(PURPOSE, file(b"\r\n--cu" * 1_000))], max_lines=2_000)[1].lines == 1_001


@pytest.mark.parametrize(
    ("content_type", "status", "code"),
    [
        (b"", 415, "unsupported_media_type"),
        (b"application/json", 415, "unsupported_media_type"),
        (b"multipart/form-data", 400, "invalid_multipart"),
        (b"multipart/form-data; boundary=" + b"x" * 300, 400, "invalid_multipart"),
    ],
)
def test_what_is_no_form_by_its_type(content_type: bytes, status: int, code: str) -> None:
    assert refusal(form(PURPOSE, file()), content_type=content_type)[:2] == (status, code)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_no_bytes_make_it_fail(pieces: list[bytes]) -> None:
    with pytest.raises(ApiError):
        read([b"--cut\r\n", *pieces])
