"""OpenAI's two forms of log probabilities, and which tokens they speak of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.answers import num_shown, output_text
from schemas.api.logprobs import chat_logprobs, completion_logprobs
from schemas.api.told_tokens import ToldTokens
from schemas.records import Completion
from schemas.sampling import TokenLogprobs
from tests.gateway_factories import MODEL

TOKENIZER = MODEL.tokenizer


def told(token_id: int, top: tuple[int, ...] = ()) -> TokenLogprobs:
    return TokenLogprobs(-token_id / 100, list(top), [-i / 100 for i in top])


def completion(finish_reason: str, text_length: int | None = None) -> Completion:
    return Completion(bytes(16), 1, 0, 5, 3, 0, 0, finish_reason, text_length)


def test_chat_tells_text_and_bytes_of_each_token() -> None:
    e_acute = "é".encode()
    shape = chat_logprobs(TOKENIZER)
    tokens = [(104, told(104, (104, 257))), (e_acute[0], TokenLogprobs(-math.inf, [], []))]
    assert shape(tokens) == {
        "content": [
            {
                "token": "h",
                "logprob": -1.04,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "h", "logprob": -1.04, "bytes": [104]},
                    {"token": "<eos>", "logprob": -2.57, "bytes": None},
                ],
            },
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_completions_tell_offsets_over_all_pieces() -> None:
    first, second = "é".encode()
    shape = completion_logprobs(TOKENIZER)
    assert shape([(104, told(104, (257,))), (first, told(first))]) == {
        "tokens": ["h", "bytes:\\xc3"],
        "token_logprobs": [-1.04, -1.95],
        "top_logprobs": [{"<eos>": -2.57, "h": -1.04}, {"bytes:\\xc3": -1.95}],
        "text_offset": [0, 1],
    }
    assert shape([(second, told(second)), (105, told(105))])["text_offset"] == [1, 2]


def test_an_end_token_is_not_told() -> None:
    tokens = ToldTokens(TOKENIZER)
    tokens.add([104, 105], [told(104), told(105)], None)
    assert [token_id for token_id, _ in tokens.take(0, None)] == [104]
    tokens.add([257], [told(257)], "stop")
    assert tokens.take(2, None) == [(105, told(105))]
    assert tokens.take(None, completion("stop")) == []


def test_nothing_of_a_stop_string_is_told() -> None:
    tokens = ToldTokens(TOKENIZER)
    ids = [*b"hey STOP"]
    tokens.add(ids, [told(i) for i in ids], "stop")
    assert bytes(i for i, _ in tokens.take(7, completion("stop", 4))) == b"hey "
    assert tokens.take(None, completion("stop", 4)) == []


def test_the_last_token_of_a_full_output_is_told() -> None:
    tokens = ToldTokens(TOKENIZER)
    tokens.add([104, 105], [told(104), told(105)], "length")
    assert len(tokens.take(None, completion("length"))) == 2


def test_what_a_worker_left_out_moves_nothing() -> None:
    tokens = ToldTokens(TOKENIZER)
    tokens.add([104, 105], [], None)
    tokens.add([106], [told(106)], None)
    assert tokens.take(None, None) == [(106, told(106))]


@pytest.mark.parametrize(
    ("ids", "finish", "length", "shown"),
    [
        (b"abc", "length", None, 3),
        (b"abc", "stop", None, 2),
        (b"abc", "stop", 0, 0),
        (b"abc", "stop", 3, 3),
        ("aéb".encode(), "stop", 2, 3),
        (b"", "length", None, 0),
    ],
)
def test_how_many_tokens_are_shown(ids: bytes, finish: str, length: int | None, shown: int) -> None:
    assert num_shown(TOKENIZER, ids, finish, length) == shown


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.data())
def test_the_tokens_told_are_those_of_the_text(text: str, data: st.DataObject) -> None:
    ids, length = list(text.encode()), data.draw(st.integers(0, len(text)))
    shown = num_shown(TOKENIZER, ids, "stop", length)
    assert bytes(ids[:shown]).decode() == text[:length] == output_text(TOKENIZER, ids, "stop", length)
