"""A response read back: behind any sequence number comes, byte for byte, what the first reading had there."""

import json
from collections.abc import Iterable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.logprobs import told_logprobs
from gateway.replay import RETRY_WAIT_MS
from gateway.response_replay import ResponseReader, ResponseReplay
from gateway.sse_responses import ResponseFrames, position_behind
from schemas.api.errors import ApiError
from schemas.records import (
    Cancellation,
    Completion,
    Described,
    Dispatched,
    Failed,
    Rejected,
    Retry,
    TokenLogprobs,
)
from schemas.stream_state import ReplyRecord, Run
from schemas.token_records import TokenChunk
from tests.gateway_factories import EPOCH, MODEL, WORKER_EPOCH, config

RID = bytes(range(16))
RUN = Run(0, WORKER_EPOCH)
CREATED = {"id": "resp_x", "status": "queued", "model": "simulated"}
Step = TokenChunk | ReplyRecord


def reading(after: int = -1) -> ResponseReplay:
    replay = ResponseReplay(RID, "acme", ResponseReader(config(), MODEL, after, 0.0))
    replay.fold.on_description(Described(RID, json.dumps(CREATED)))
    return replay


def chunks(text: bytes, sizes: Iterable[int], finish: str | None, attempt: int = 1) -> list[TokenChunk]:
    """`text` token by byte, in chunks of these sizes and a last one with what is left."""
    found, at = [], 0
    for size in (*sizes, len(text)):
        ids = list(text[at : at + size])
        told = [TokenLogprobs(-float(i), [], []) for i in ids]
        found.append(TokenChunk(RID, attempt, at, ids, finish if at + size >= len(text) else None, told))
        at += size
        if at >= len(text):
            return found
    return found


@st.composite
def logs(draw: st.DrawFn) -> list[Step]:
    text = draw(st.text(alphabet="aé漢🙂", min_size=1, max_size=12)).encode()
    sizes = draw(st.lists(st.integers(1, 5), max_size=20))
    cut = draw(st.integers(1, len(text)))  # an output may end within a character
    text = text[:cut]
    steps: list[Step] = [Dispatched(RID, 1, EPOCH, *RUN, "simulated")]
    end = draw(st.sampled_from(["length", "cancelled", "failed"]))
    steps += chunks(text, sizes, "length" if end == "length" else None)
    if end == "failed":
        return [*steps, Failed(RID, 1, EPOCH, "worker_lost", "gone")]
    return [*steps, Completion(RID, 1, *RUN, 3, 0, len(text), end)]


def read(steps: Iterable[Step], starting_after: int = -1) -> list[bytes]:
    """The events that a client gets which reads after each record."""
    replay = reading(position_behind(starting_after))
    replay.fold.on_cancellation(Cancellation(RID, 9, "acme", "cancelled"))  # a cancelled end is the end
    reader = replay.response_reader
    frames = ResponseFrames(
        CREATED,
        RID,
        MODEL.tokenizer,
        reader,
        partial(told_logprobs, reader, MODEL.tokenizer),
        lambda: replay.state.ended,
        starting_after,
    )
    body = frames.first()
    for step in steps:
        if isinstance(step, TokenChunk):
            replay.fold.on_chunk(RUN, step, 0, 0.0)
        else:
            replay.fold.on_record(step, 0)
        while reader.has_more:
            body += b"".join(frames.text(text, position) for text, position in reader.take())
    assert reader.end is not None
    body += frames.done(reader.end) if isinstance(reader.end, Completion) else frames.error(reader.end)
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def number_of(event: bytes) -> int:
    number: int = json.loads(event.split(b"data: ", 1)[1])["sequence_number"]
    return number


@given(logs())
def test_behind_any_event_comes_what_followed_it(steps: list[Step]) -> None:
    events = read(steps)
    numbers = [number_of(event) for event in events]
    assert numbers == sorted(set(numbers))
    for i, number in enumerate(numbers):
        assert read(steps, number) == events[i + 1 :]
    assert read(steps, numbers[-1] + 100) == []


def status(replay: ResponseReplay, now_ms: int = 0) -> object:
    end = replay.end_by(now_ms)
    if isinstance(end, ApiError):
        return end.code
    return None if end is None else end.finish_reason


def test_an_attempt_that_failed_is_the_end_when_no_retry_came() -> None:
    replay = reading()
    replay.fold.on_record(Dispatched(RID, 1, EPOCH, *RUN, "simulated"), 1_000)
    assert status(replay) is None
    replay.fold.on_record(Completion(RID, 1, *RUN, 3, 0, 0, "cancelled"), 2_000)
    assert status(replay, 2_000 + RETRY_WAIT_MS - 1) is None
    assert status(replay, 2_000 + RETRY_WAIT_MS) == "cancelled"
    replay.fold.on_record(Retry(RID, 2, EPOCH, "worker_cancelled"), 2_001)
    assert status(replay, 2_000 + RETRY_WAIT_MS) is None


def test_a_refusal_is_an_end() -> None:
    replay = reading()
    replay.fold.on_record(Rejected(RID, 1, 429, "token_rate_exceeded", "no"), 0)
    assert status(replay) == "token_rate_exceeded"
