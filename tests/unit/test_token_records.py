"""`Tokens`: what goes in by request comes out by request, and columns that do not fit are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import CodecError, decode, encode
from schemas.sampling import TokenLogprobs
from schemas.token_records import TokenChunk, Tokens

_IDS = st.integers(0, 2**31)
_LOGPROBS = st.builds(
    TokenLogprobs, st.floats(-9, 0), st.lists(_IDS, max_size=2), st.lists(st.floats(-9, 0), max_size=2)
)
_CHUNKS = st.lists(
    st.builds(
        TokenChunk,
        request_id=st.binary(min_size=16, max_size=16),
        attempt=st.integers(1, 4),
        position=st.integers(0, 10_000),
        token_ids=st.lists(_IDS, max_size=4),
        finish_reason=st.sampled_from([None, None, "stop", "length"]),
        logprobs=st.lists(_LOGPROBS, max_size=3),
    ),
    max_size=6,
)


@given(_CHUNKS)
def test_chunks_come_out_of_the_log_as_they_were(chunks: list[TokenChunk]) -> None:
    record = decode(encode(Tokens.of(3, 70, chunks)))
    assert (record.slot, record.epoch, record.chunks) == (3, 70, chunks)


def test_a_chunk_may_grow_without_the_others() -> None:
    first, second = Tokens.of(
        0, 1, [TokenChunk(b"a" * 16, 1, 0, [1]), TokenChunk(b"b" * 16, 1, 0, [2])]
    ).chunks
    first.logprobs.append(TokenLogprobs(-1.0, [], []))
    first.token_ids.append(5)
    assert (second.token_ids, second.logprobs) == ([2], [])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"attempts": []}, "differ in length"),
        ({"positions": [0, 1, 2]}, "differ in length"),
        ({"num_tokens": [3]}, "differ in length"),
        ({"finish_reasons": ["stop"]}, "differ in length"),
        ({"num_logprobs": [0]}, "differ in length"),
        ({"num_tokens": [1, 1]}, "num_tokens does not part 3 token_ids"),
        ({"num_tokens": [-1, 4]}, "num_tokens does not part 3 token_ids"),
        ({"num_logprobs": [0, 1]}, "num_logprobs does not part 0 logprobs"),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(columns: dict[str, list[int]], message: str) -> None:
    chunks = [TokenChunk(b"a" * 16, 1, 0, [1, 2]), TokenChunk(b"b" * 16, 1, 0, [3])]
    record = Tokens.of(0, 1, chunks)
    for name, values in columns.items():
        setattr(record, name, values)
    with pytest.raises(CodecError, match=f"broken Tokens record: ValueError: .*{message}"):
        decode(encode(record))
