"""Log probabilities beside the text of a stream: however it is cut, in sum those of the whole answer."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.api.logprobs import streamed_logprobs, whole_logprobs
from gateway.metrics import Metrics
from gateway.reader import Reader, StreamReader, WholeReader
from schemas.api.answers import num_shown, output_text
from schemas.api.prepare import COMPLETIONS_URL, Prepared
from schemas.api.told_tokens import ToldTokens
from schemas.priority import PriorityClass
from schemas.records import Completion
from schemas.sampling import SamplingParams, TokenLogprobs
from tests.gateway_factories import MODEL

TIMING = Metrics().timings[PriorityClass.INTERACTIVE]
PREPARED = Prepared(COMPLETIONS_URL, MODEL, [256], 1, SamplingParams(8, logprobs=1), None, True)
STOP = "STOP"


def reader_of(*, stream: bool, may_be_cut: bool) -> Reader:
    reader: Reader
    if stream:
        reader = StreamReader(
            "simulated",
            TIMING,
            0.0,
            MODEL.tokenizer.detokenizer(),
            may_be_cut=may_be_cut,
            start_wait_s=1.0,
            keep_alive_s=1.0,
            write_timeout_s=1.0,
        )
    else:
        reader = WholeReader("simulated", TIMING, 0.0)
    reader.told = ToldTokens(MODEL.tokenizer)
    return reader


def feed(reader: Reader, ids: list[int], count: int, finish_reason: str | None) -> None:
    """As the owner does."""
    assert reader.told is not None
    reader.told.add(ids, [TokenLogprobs(-i / 10, [i], [-i / 10]) for i in ids], finish_reason)
    reader.token_ids += ids
    reader.on_tokens(count, finish_reason, 0.0)


def joined(pieces: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for piece in pieces for item in piece[name]] for name in names}


@given(st.text("aé🙂 S", max_size=8), st.sampled_from(["length", "eos", "stop"]), st.booleans(), st.data())
def test_pieces_make_the_whole(text: str, how: str, may_be_cut: bool, data: st.DataObject) -> None:
    ids = list(text.encode())
    if how == "eos":
        ids.append(257)
    elif how == "stop":
        ids += f"{STOP}x".encode()
    length = len(text) if how == "stop" else None
    finish = "length" if how == "length" else "stop"
    completion = Completion(bytes(16), 1, 0, 5, 1, 0, len(ids), finish, length)
    assume(ids)

    # The worker tells what may become a stop string with what ends the output, and not before.
    tellable = len(text.encode().rstrip(b"S")) if how == "stop" else len(ids) - 1
    cuts = sorted(data.draw(st.sets(st.integers(0, tellable), max_size=4)) - {0})
    stream = reader_of(stream=True, may_be_cut=may_be_cut or how == "stop")
    whole = reader_of(stream=False, may_be_cut=False)
    assert isinstance(stream, StreamReader)
    take = streamed_logprobs(stream, PREPARED)
    assert take is not None
    pieces: list[dict[str, Any]] = []
    seen = ""

    def look() -> None:
        nonlocal seen
        while taken := stream.take():
            for text, position in taken:
                seen += text
                piece = take(position)
                pieces.extend([] if piece is None else [piece])

    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        feed(stream, ids[start:end], end, finish if end == len(ids) else None)
        if data.draw(st.booleans()):
            look()
    stream.on_end(completion)
    look()
    left = take(None)
    pieces += [] if left is None else [left]

    feed(whole, ids, len(ids), finish)
    expected = whole_logprobs(whole, PREPARED, completion)
    assert joined(pieces) == expected
    assert seen == output_text(MODEL.tokenizer, ids, finish, length)
    assert len(joined(pieces)["tokens"]) == num_shown(MODEL.tokenizer, ids, finish, length)


def test_a_reader_that_was_asked_for_none_tells_none() -> None:
    reader = WholeReader("simulated", TIMING, 0.0)
    assert streamed_logprobs(reader, PREPARED) is None
    assert whole_logprobs(reader, PREPARED, Completion(bytes(16), 1, 0, 5, 1, 0, 0, "length")) is None
