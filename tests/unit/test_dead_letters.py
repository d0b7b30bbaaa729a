"""What is kept of a bad record: all of it where that fits, and never more than the topic takes."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.dead_letters import CUT, MAX_REASON_BYTES, REASON, dead_letter
from schemas.topics import MAX_RECORD_BYTES

MOST = 200_000


def test_a_record_that_fits_is_kept_as_it_came_with_the_reason_behind_its_headers() -> None:
    assert dead_letter(b"k", b"value", [("a", b"1"), ("b", None)], "no Avro") == (
        b"k",
        b"value",
        [("a", b"1"), ("b", b""), (REASON, b"no Avro")],
    )
    assert dead_letter(None, None, [], "empty") == (None, None, [(REASON, b"empty")])


def test_of_one_that_does_not_its_head_is_kept_and_what_it_had_is_told() -> None:
    letter = dead_letter(b"k", b"\xff" * MAX_RECORD_BYTES, [("request_id", bytes(16))], "no Avro")
    assert letter.value is not None
    assert MAX_RECORD_BYTES - 2_000 < len(letter.value) < MAX_RECORD_BYTES
    assert letter.headers == [
        ("request_id", bytes(16)),
        (REASON, b"no Avro"),
        (CUT, b"value of 8388608 bytes"),
    ]


@given(
    st.none() | st.integers(0, 50_000),
    st.none() | st.integers(0, 2 * MOST),
    st.lists(st.integers(0, 50_000), max_size=5),
    st.text(max_size=5) | st.just("ü" * MAX_REASON_BYTES),
)
def test_it_is_never_larger_than_its_topic_takes(
    key: int | None, value: int | None, headers: list[int], reason: str
) -> None:
    given_key, given_value = (None if n is None else b"x" * n for n in (key, value))
    given_headers = [("h", b"x" * n) for n in headers]
    letter = dead_letter(given_key, given_value, given_headers, reason, MOST)
    size = len(letter.key or b"") + len(letter.value or b"")
    size += sum(len(name) + len(content) for name, content in letter.headers)
    assert size <= MOST - 500
    found = dict(letter.headers)
    assert reason.encode().startswith(found[REASON])
    whole = (letter.key, letter.value, letter.headers[:-1]) == (given_key, given_value, given_headers)
    assert (CUT in found) is not whole
