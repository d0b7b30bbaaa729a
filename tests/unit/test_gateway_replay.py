"""Reading a stream from its records: a client that comes back gets exactly what it lacks."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reader import StreamReader
from gateway.replay import RETRY_WAIT_MS, Replay, ReplayReader
from schemas.api.errors import ApiError
from schemas.records import (
    Cancellation,
    Completion,
    Dispatched,
    Failed,
    Rejected,
    Retry,
)
from schemas.stream_state import ReplyRecord, Run
from schemas.token_records import TokenChunk
from tests.gateway_factories import EPOCH, MODEL, WORKER_EPOCH, config

RID = bytes(range(16))
RUN = Run(0, WORKER_EPOCH)
END_TOKEN = 257
Step = TokenChunk | ReplyRecord


def replay(after: int = -1, may_be_cut: bool = False) -> Replay:
    return Replay(RID, "acme", ReplayReader(config(), MODEL, may_be_cut, after, 0.0))


def reader_of(target: Replay) -> StreamReader:
    assert isinstance(target.reader, StreamReader)
    return target.reader


def dispatched(attempt: int = 1, run: Run = RUN) -> Dispatched:
    return Dispatched(RID, attempt, EPOCH, run.slot, run.epoch, "simulated")


def completion(count: int, reason: str, text_length: int | None = None, attempt: int = 1) -> Completion:
    return Completion(RID, attempt, *RUN, 3, 0, count, reason, text_length)


def feed(target: Replay, steps: Iterable[Step], timestamp_ms: int = 0) -> list[tuple[str, int]]:
    """What a client that is quick to read gets: (text, position) of each event."""
    events = []
    for step in steps:
        if isinstance(step, TokenChunk):
            target.fold.on_chunk(RUN, step, timestamp_ms, 0.0)
        else:
            target.fold.on_record(step, timestamp_ms)
        while taken := reader_of(target).take():
            events += taken
    return events


def text_of(events: Iterable[tuple[str, int]]) -> str:
    return "".join(text for text, _ in events)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[Step], bool]:
    """The records of a whole stream, and whether it names stop strings."""
    text = draw(st.text(st.sampled_from("aé漢🙂 \n"), max_size=12))
    ids = list(text.encode())
    if draw(st.booleans()):
        ids.insert(draw(st.integers(0, len(ids))), 0xFF)  # never UTF-8
    stops = draw(st.booleans())
    text_length = None
    reason = draw(st.sampled_from(["stop", "length"]))
    held = 0
    if reason == "stop" and stops and draw(st.booleans()):
        shown = bytes(ids).decode(errors="replace")
        text_length = draw(st.integers(0, len(shown)))
        # The worker tells nothing beyond what may become a stop string before the end.
        held = len(ids) - len(shown[:text_length].encode()) if 0xFF not in ids else len(ids)
        held = max(1, held)
        ids += b"." if not ids else b""
    elif reason == "stop":
        ids.append(END_TOKEN)
        held = draw(st.integers(1, len(ids))) if stops else 1
    steps: list[Step] = [dispatched()]
    at, last = 0, len(ids) - held
    while at < last:
        to = draw(st.integers(at + 1, last))
        done = reason == "length" and to == len(ids)
        steps.append(TokenChunk(RID, 1, at, ids[at:to], "length" if done else None))
        at = to
    if reason == "stop":
        steps.append(TokenChunk(RID, 1, at, ids[at:], "stop"))
    steps.append(completion(len(ids), reason, text_length))
    return steps, stops


@given(outputs())
def test_what_was_read_and_what_comes_after_it_is_the_whole_text(output: tuple[list[Step], bool]) -> None:
    steps, stops = output
    events = feed(replay(may_be_cut=stops), steps)
    whole = text_of(events)
    read = ""
    for text, position in events:
        read += text
        again = replay(position, stops)
        assert read + text_of(feed(again, steps)) == whole
        assert isinstance(again.reader.end, Completion)


@given(outputs(), st.integers(-1, 60))
def test_the_cut_is_where_the_text_of_the_tokens_up_to_it_ends(
    output: tuple[list[Step], bool], after: int
) -> None:
    steps, stops = output
    whole = text_of(feed(replay(may_be_cut=stops), steps))
    ids = [i for step in steps if isinstance(step, TokenChunk) for i in step.token_ids]
    known = MODEL.tokenizer.detokenizer().push(ids[: after + 1])
    late = feed(replay(after, stops), steps)
    assert text_of(late) == whole[len(known) :]
    assert all(position > after for _, position in late)


def test_a_character_that_was_not_whole_comes_behind_the_position() -> None:
    é = "é".encode()
    steps: list[Step] = [
        TokenChunk(RID, 1, 0, [97, é[0]]),
        TokenChunk(RID, 1, 2, [é[1], 98], "length"),
        completion(4, "length"),
    ]
    assert feed(replay(1), steps) == [("é", 2), ("b", 3)]
    assert feed(replay(2), steps) == [("b", 3)]
    assert feed(replay(3), steps) == []
    assert feed(replay(99), steps) == []


def test_a_retry_goes_on_where_the_first_attempt_was() -> None:
    second = Run(1, WORKER_EPOCH + 1)
    target = replay(0)
    feed(target, [dispatched(), TokenChunk(RID, 1, 0, [97, 98])])
    target.fold.on_record(Retry(RID, 2, EPOCH, "worker_lost"), 0)
    target.fold.on_chunk(RUN, TokenChunk(RID, 1, 2, [120]), 0, 0.0)  # the lost worker was not
    target.fold.on_chunk(second, TokenChunk(RID, 2, 2, [99], "length"), 0, 0.0)
    assert reader_of(target).take() == [("c", 2)]
    target.fold.on_record(Completion(RID, 2, *second, 3, 0, 3, "length"), 0)
    assert isinstance(target.reader.end, Completion)


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (Rejected(RID, 1, 429, "rate_limit_exceeded", "no", 2_000), 429, "rate_limit_exceeded"),
        (Rejected(RID, 1, 499, "cancelled", "no"), 410, "cancelled"),
        (Rejected(RID, 1, 499, "deadline_exceeded", "late"), 504, "deadline_exceeded"),
        (Failed(RID, 1, EPOCH, "cancelled", "late"), 410, "cancelled"),
        (Failed(RID, 1, EPOCH, "deadline_exceeded", "late"), 504, "deadline_exceeded"),
        (Failed(RID, 1, EPOCH, "worker_lost", "gone"), 502, "worker_lost"),
        (Failed(RID, 1, EPOCH, "no_answer", "gone"), 503, "no_answer"),
    ],
)
def test_a_stream_that_failed_fails_again(end: Rejected | Failed, status: int, code: str) -> None:
    target = replay()
    target.fold.on_record(end, 0)
    assert isinstance(target.reader.end, ApiError)
    assert (target.reader.end.status, target.reader.end.code) == (status, code)
    assert target.done


def test_the_end_of_an_attempt_waits_for_the_owners_word() -> None:
    cancelled = completion(0, "cancelled")
    in_history, live, retried, asked = replay(), replay(), replay(), replay()
    for target in (in_history, live, retried):
        feed(target, [dispatched(), cancelled], 1_000)
        assert not target.done
    # Later records show that no retry came.
    in_history.fold.on_time(1_000 + RETRY_WAIT_MS - 1, None)
    assert not in_history.done
    in_history.fold.on_time(1_000 + RETRY_WAIT_MS, None)
    assert in_history.reader.end is cancelled
    # With nothing behind it, the log's clock does.
    live.fold.on_time(1_000, 5)
    live.fold.on_time(1_000, 5 + RETRY_WAIT_MS - 1)
    assert not live.done
    live.fold.on_time(1_000, 5 + RETRY_WAIT_MS)
    assert live.reader.end is cancelled
    retried.fold.on_record(Retry(RID, 2, EPOCH, "cancelled"), 1_010)
    retried.fold.on_time(90_000, 90_000)
    assert not retried.done
    # A client asked for it: nothing more will come.
    asked.fold.on_cancellation(Cancellation(RID, 1, "another", "cancelled"))
    asked.fold.on_cancellation(Cancellation(RID, 1, "acme", "cancelled"))
    feed(asked, [dispatched(), cancelled], 1_000)
    assert asked.reader.end is cancelled
    late = replay()  # the word lies behind the end
    feed(late, [dispatched(), cancelled], 1_000)
    late.fold.on_cancellation(Cancellation(RID, 1, "acme", "disconnected"))
    assert late.reader.end is cancelled


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_attempt_that_ended_and_is_not_tried_again_is_a_failure(reason: str) -> None:
    target = replay()
    feed(target, [dispatched(), completion(0, reason), Failed(RID, 1, EPOCH, "engine_error", "no")], 1_000)
    assert isinstance(target.reader.end, ApiError)
    assert target.reader.end.code == "engine_error"


def test_another_tenants_cancellation_is_no_word() -> None:
    target = replay()
    target.fold.on_cancellation(Cancellation(RID, 1, "another", "cancelled"))
    feed(target, [dispatched(), completion(0, "cancelled")])
    assert not target.done
