from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.tokenization import Detokenizer
from workers.stop_strings import StopStringChecker

# Whole characters, halves of characters, several characters, bytes that are no UTF-8, and nothing at all.
TABLE = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b"bca",
    "é".encode(),
    b"\xc3",
    b"\xa9",
    b"\xff",
    b"",
    b"aabb",
    "cé".encode(),
]
PIECES = "abcé�"


def text_of(token_ids: list[int]) -> str:
    return Detokenizer(TABLE).push(token_ids)


def naive(token_ids: list[int], stop: list[str], min_tokens: int) -> tuple[int, int] | None:
    """(tokens taken, characters kept) by looking through the whole text after each token."""
    before = 0
    for count in range(1, len(token_ids) + 1):
        text = text_of(token_ids[:count])
        starts = [
            start
            for string in stop
            for start in range(len(text) - len(string) + 1)
            if text.startswith(string, start) and start + len(string) > before
        ]
        before = len(text)
        if starts and count >= min_tokens:
            return count, min(starts)
    return None


def naive_held(token_ids: list[int], stop: list[str]) -> int:
    """Newest tokens that reach into the longest end of the text that a stop string goes on from."""
    text = text_of(token_ids)
    pending = max(
        (n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])), default=0
    )
    shown = len(text) - pending
    return sum(len(text_of(token_ids[: i + 1])) > shown for i in range(len(token_ids)))


@settings(max_examples=400, deadline=None)
@given(
    token_ids=st.lists(st.integers(-1, len(TABLE)), max_size=14),
    stop=st.lists(st.text(PIECES, min_size=1, max_size=5), min_size=1, max_size=4),
    min_tokens=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_it_cuts_and_holds_as_the_naive_definition_says(
    token_ids: list[int], stop: list[str], min_tokens: int
) -> None:
    checker = StopStringChecker(stop, TABLE, min_tokens)
    expected = naive(token_ids, stop, min_tokens)
    shown = 0
    for count, token_id in enumerate(token_ids, 1):
        cut = checker.push(token_id)
        if cut is not None:
            assert (count, cut) == expected
            # What was shown lies before the cut.
            assert len(text_of(token_ids[:shown])) <= cut
            return
        assert checker.num_held == naive_held(token_ids[:count], stop)
        # Held tokens are never fewer than before by more than what is shown now.
        assert count - checker.num_held >= shown
        shown = count - checker.num_held
    assert expected is None


def run(stop: list[str], texts: list[str], min_tokens: int = 0) -> list[int | None]:
    table = [text.encode() for text in texts]
    checker = StopStringChecker(stop, table, min_tokens)
    return [checker.push(token_id) for token_id in range(len(texts))]


def test_a_stop_string_is_found_across_tokens_and_inside_one() -> None:
    assert run(["END"], ["one E", "N", "D two"]) == [None, None, 4]
    assert run(["END"], ["xENDx"]) == [1]


def test_of_two_that_end_in_one_token_the_one_that_begins_first_cuts() -> None:
    assert run(["cd", "bcde"], ["a", "bcde"]) == [None, 1]
    assert run(["bcde", "cd"], ["abc", "d"]) == [None, 2]


def test_nothing_stops_before_min_tokens_and_what_ended_earlier_is_forgotten() -> None:
    assert run(["x"], ["x", "x", "x"], min_tokens=3) == [None, None, 2]
    assert run(["x"], ["x", "x", "a", "b"], min_tokens=3) == [None, None, None, None]
    assert run(["xa"], ["x", "a", "a"], min_tokens=3) == [None, None, None]
    assert run(["xaa"], ["x", "a", "a"], min_tokens=3) == [None, None, 0]


def test_replacement_characters_count_as_the_detokenizer_shows_them() -> None:
    checker = StopStringChecker(["!"], [b"\xff", b"\xc3", b"!"])
    assert [checker.push(token_id) for token_id in (0, 1, 2)] == [None, None, 2]


def test_a_long_prefix_is_held_for_as_long_as_it_may_go_on() -> None:
    stop = ["a" * 255 + chr(98 + i) for i in range(16)]
    checker = StopStringChecker(stop, [b"aaaa", b"q", b"p"])
    assert [checker.push(0) for _ in range(100)] == [None] * 100
    assert checker.num_held == 64  # 255 characters, in whole tokens
    assert checker.push(2) == 400 - 255
    assert checker.push(1) is None
    assert checker.num_held == 0
