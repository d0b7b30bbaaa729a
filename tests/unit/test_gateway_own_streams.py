"""Streams read back where their fold is: what a reading of the log would show, and no more is kept
than there is room for."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from aiokafka import ConsumerRecord
from hypothesis import given
from hypothesis import strategies as st

import gateway.own_streams
from gateway.kept_folds import KeptFolds, Place
from gateway.own_streams import OwnStreams
from gateway.owner import Owner, reply_partition
from gateway.reader import Reader, StreamReader
from gateway.replay import RETRY_WAIT_MS, Replay, ReplayReader, StreamFold
from gateway.response_replay import ResponseReader, ResponseReplay
from schemas.codec import encode
from schemas.records import (
    Cancellation,
    Claim,
    Completion,
    Described,
    Dispatched,
    Failed,
    Retry,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from schemas.stream_state import ReplyRecord, Run
from schemas.token_records import TokenChunk
from tests.gateway_factories import EPOCH, MODEL, SLOT, WORKER_EPOCH, config, inference_request

RID = bytes(range(16))
PARTITION = reply_partition(SLOT, 0)
END_TOKEN = 257
Event = tuple[str, int]


class Log(NamedTuple):
    """All records about a request, and whether it names stop strings."""

    records: list[Tokens | ReplyRecord]
    stops: bool


def run_of(attempt: int) -> Run:
    return Run(attempt - 1, WORKER_EPOCH + attempt)


@st.composite
def logs(draw: st.DrawFn, told: bool = False) -> Log:
    """Up to three attempts, of which the last comes to some end; a worker may end the output and be lost."""
    ids = list(draw(st.text(st.sampled_from("aé漢🙂 "), min_size=1, max_size=8)).encode())
    stops = draw(st.booleans())
    records: list[Tokens | ReplyRecord] = []
    at, attempts = 0, draw(st.integers(1, 3))
    for attempt in range(1, attempts + 1):
        run = run_of(attempt)
        if draw(st.booleans()):
            records.append(Dispatched(RID, attempt, EPOCH, *run, "simulated"))
        last = attempt == attempts
        to = len(ids) if last else draw(st.integers(at, len(ids)))
        finish = draw(st.sampled_from(["length", "stop"])) if last or draw(st.booleans()) else None
        begin = draw(st.integers(0, at))  # what it tells may be known in part
        while True:
            end = draw(st.integers(min(begin + 1, to), to))
            done = end == to
            new = ids[begin:end]
            logprobs = [TokenLogprobs(-float(i), [], []) for i in new] if told and draw(st.booleans()) else []
            chunk = TokenChunk(RID, attempt, begin, new, finish if done else None, logprobs)
            records.append(Tokens.of(*run, [chunk]))
            begin = end
            if done:
                break
        at = max(at, to)
        if not last:
            records.append(Retry(RID, attempt + 1, EPOCH, "worker_lost"))
    how = draw(st.sampled_from(["completed", "failed", "cancelled", "open"]))
    if how == "failed":
        records.append(Failed(RID, attempts, EPOCH, "worker_lost", "gone"))
    elif how != "open":
        reason = finish if how == "completed" else "cancelled"
        assert reason is not None
        cut = draw(st.integers(0, len(bytes(ids).decode()))) if stops and reason == "stop" else None
        records.append(Completion(RID, attempts, *run_of(attempts), 3, 0, len(ids), reason, cut))
    return Log(records, stops)


def give(fold: StreamFold, record: Tokens | ReplyRecord) -> None:
    if isinstance(record, Tokens):
        for chunk in record.chunks:
            fold.on_chunk(Run(record.slot, record.epoch), chunk, 1_000, 0.0)
    else:
        fold.on_record(record, 1_000)


def reader_of(stops: bool, after: int = -1) -> ReplayReader:
    return ReplayReader(config(), MODEL, stops, after, 0.0)


def taken(reader: StreamReader) -> list[Event]:
    events: list[Event] = []
    while reader.has_more:
        events += reader.take()
    return events


def shown(reader: StreamReader) -> tuple[object, ...]:
    """What a client is told in the end; of an error what it says."""
    end = reader.end if isinstance(reader.end, Completion) else repr(reader.end)
    return taken(reader), end, reader.cut_off, reader.token_ids, reader.bound


@given(logs(), st.data())
def test_whoever_comes_later_is_shown_what_the_log_shows(log: Log, data: st.DataObject) -> None:
    after = data.draw(st.integers(-1, 12))
    late_at = data.draw(st.integers(0, len(log.records)))
    from_log = Replay(RID, "acme", reader_of(log.stops, after))
    fold = StreamFold(RID, "acme")
    late = Replay(RID, "acme", reader_of(log.stops, after))
    for at, record in enumerate(log.records):
        if at == late_at:
            late.attach(fold, 0.0)
        give(from_log.fold, record)
        give(fold, record)
    if late_at == len(log.records):
        late.attach(fold, 0.0)
    assert isinstance(from_log.reader, StreamReader)
    assert isinstance(late.reader, StreamReader)
    bound = from_log.reader.bound or from_log.state.run is not None
    assert shown(late.reader) == (*shown(from_log.reader)[:-1], bound)


@given(logs(told=True), st.integers(0, 30))
def test_log_probabilities_come_late_as_they_come(log: Log, late_at: int) -> None:
    def replay() -> ResponseReplay:
        return ResponseReplay(RID, "acme", ResponseReader(config(), MODEL, -1, 0.0))

    from_log, late, fold = replay(), replay(), StreamFold(RID, "acme")
    for record in log.records[:late_at]:
        give(fold, record)
    late.attach(fold, 0.0)
    for record in log.records[late_at:]:
        give(fold, record)
    for record in log.records:
        give(from_log.fold, record)
    told = []
    for each in (from_log, late):
        assert each.reader.told is not None
        end = each.reader.end
        told.append(each.reader.told.take(None, end if isinstance(end, Completion) else None))
    assert told[0] == told[1]


class Desk:
    """An owner of one request, and what it reads."""

    def __init__(self, position: int = 100) -> None:
        self.owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
        self.owner.position = lambda partition: position
        self.own = OwnStreams(self.owner, {PARTITION: position})
        self.owner.on_over = self.own.on_over
        self.request = inference_request(RID, reply_partition=PARTITION)
        self.owned = self.owner.accept(self.request, Reader("simulated", reader_of(False)._timing, 0.0))
        self.owned.stream_id = "here"
        self._offset = position

    def read(self, record: object) -> None:
        if isinstance(record, Tokens):
            self.owner.on_tokens(record, 1_000, 0.0)
        elif isinstance(record, ReplyRecord):
            self.owner.on_record(record, 1_000)
        message = ConsumerRecord(
            "inference.tokens", PARTITION, self._offset, 1_000, 0, None, encode(record), 0, -1, -1, []
        )
        self._offset += 1
        self.own.on_record(record, message)

    def fold(self, first_offset: int = 100, tenant: str = "acme", rid: bytes = RID) -> StreamFold | None:
        return self.own.fold(rid, tenant, PARTITION, first_offset, 0.0)


@given(logs(), st.data())
def test_the_owner_shows_what_the_log_shows(log: Log, data: st.DataObject) -> None:
    late_at = data.draw(st.integers(0, len(log.records)))
    desk, from_log = Desk(), Replay(RID, "acme", reader_of(log.stops))
    late = Replay(RID, "acme", reader_of(log.stops))

    def come() -> None:
        fold = desk.fold()
        assert fold is not None
        feed = desk.own.feeds[PARTITION]
        assert fold.position == feed.position
        if not fold.over:
            feed.join(fold)
        late.attach(fold, 0.0)

    for at, record in enumerate(log.records):
        if at == late_at:
            come()
        give(from_log.fold, record)
        desk.read(record)
    if late_at == len(log.records):
        come()
    assert isinstance(from_log.reader, StreamReader)
    assert isinstance(late.reader, StreamReader)
    assert shown(late.reader)[:-1] == shown(from_log.reader)[:-1]


ALIVE = Tokens.of(*run_of(1), [TokenChunk(RID, 1, 0, [97, 98])])
DONE = Completion(RID, 1, *run_of(1), 3, 0, 2, "length")


def test_what_the_owner_does_not_know_in_full_is_read_from_the_log() -> None:
    desk = Desk()
    assert desk.fold() is not None
    assert desk.fold(rid=bytes(16)) is None
    assert desk.fold(tenant="another") is None
    assert desk.fold(first_offset=101) is None
    desk.owned.described = True  # but what was stored is not here
    assert desk.fold() is None
    desk.owned.description = '{"id": "resp_x"}'
    fold = desk.fold()
    assert fold is not None
    assert (fold.created, fold.caught_up) == ({"id": "resp_x"}, True)
    desk.owned.stream_id = ""  # taken over
    assert desk.fold() is None
    desk.owned.stream_id = "here"
    desk.request.sampling = SamplingParams(max_tokens=10, logprobs=1)
    assert desk.fold() is None
    desk.request.sampling = SamplingParams(max_tokens=10)
    desk.owner.held = True
    assert desk.fold() is None


def test_a_cancelled_request_is_over_where_its_owner_wanted_it() -> None:
    desk = Desk()
    desk.read(ALIVE)
    early = Replay(RID, "acme", reader_of(False))
    fold = desk.fold()
    assert fold is not None
    desk.own.feeds[PARTITION].join(fold)
    early.attach(fold, 0.0)
    desk.owner.abandon(desk.owned, "disconnected")
    desk.read(replace(DONE, finish_reason="cancelled"))
    late = Replay(RID, "acme", reader_of(False))
    ended = desk.fold()
    assert ended is not None
    late.attach(ended, 0.0)
    for replay in (early, late):
        assert isinstance(replay.reader.end, Completion)
        assert replay.reader.token_ids == [97, 98]


def test_an_attempt_that_ended_early_is_waited_for_as_long_as_by_the_log() -> None:
    desk = Desk()
    desk.read(ALIVE)
    desk.read(Claim(EPOCH, 2, 99, RID))  # whether another follows its new owner says
    desk.read(replace(DONE, finish_reason="cancelled"))
    fold = desk.fold()
    assert fold is not None
    fold.on_time(1_000 + RETRY_WAIT_MS - 1, None)
    assert not fold.over
    fold.on_time(1_000 + RETRY_WAIT_MS, None)
    assert fold.over


def test_what_ended_here_is_known_for_a_minute_and_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    desk.read(ALIVE)
    desk.read(DONE)
    assert desk.owner.open == {}
    fold = desk.fold()
    assert fold is not None
    assert (fold.over, fold.state.token_ids) == (True, [97, 98])
    monkeypatch.setattr(gateway.own_streams, "_ENDED_BYTES", 0)
    other = inference_request(bytes(16), reply_partition=PARTITION)
    owned = desk.owner.accept(other, Reader("simulated", reader_of(False)._timing, 0.0))
    owned.stream_id = "there"
    desk.read(Failed(bytes(16), 1, EPOCH, "no_answer", "no"))
    assert desk.fold() is None  # the oldest makes room
    assert desk.fold(rid=bytes(16)) is not None
    desk.own.tick(1e12, 0)
    assert desk.fold(rid=bytes(16)) is None


def test_a_claim_and_a_cancel_are_read_by_who_reads_at_the_owner() -> None:
    desk = Desk()
    fold = desk.fold()
    assert fold is not None
    desk.own.feeds[PARTITION].join(fold)
    desk.read(Claim(EPOCH, 2, 99, RID))
    desk.read(Described(RID, '{"id": "resp_x"}'))
    desk.read(Cancellation(RID, 9, "acme", "cancelled"))
    desk.read(ALIVE)
    desk.read(replace(DONE, finish_reason="cancelled"))
    assert (fold.state.owner_epoch, fold.created, fold.over) == (99, {"id": "resp_x"}, True)


def kept(folds: KeptFolds, count: int, tokens: int, now: float = 0.0) -> list[tuple[Place, StreamFold]]:
    made = []
    for n in range(count):
        fold = StreamFold(bytes([n]) * 16, "acme")
        fold.state.token_ids += range(tokens)
        fold.over = True
        place = Place("acme", fold.request_id, 3, n)
        folds.put(place, fold, now)
        made.append((place, fold))
    return made


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400), st.booleans()), max_size=40))
def test_kept_folds_are_never_more_than_there_is_room_for(steps: list[tuple[int, int, bool]]) -> None:
    folds = KeptFolds(50_000, 600.0)
    held: dict[Place, StreamFold] = {}
    for n, tokens, take in steps:
        place = Place("acme", bytes([n]) * 16, 3, 0)
        if take:
            fold = folds.take(place)
            assert fold is None or not fold.kept
            held.pop(place, None)
        else:
            fold = StreamFold(place.request_id, "acme")
            fold.state.token_ids += range(tokens)
            fold.over = True
            folds.put(place, fold, 0.0)
            held[place] = fold
        assert folds.num_bytes <= 50_000
        alive = {place: fold for place, fold in held.items() if fold.kept}
        assert len(folds) == len(alive)
        assert all(folds.get(place) is fold for place, fold in alive.items())
        assert folds.num_bytes == sum(fold.num_bytes for fold in alive.values())


def test_the_one_that_was_put_first_goes_first_and_age_counts() -> None:
    folds = KeptFolds(20_000, 600.0)
    made = kept(folds, 4, 100)  # 6,000 bytes each
    assert [folds.get(place) is fold for place, fold in made] == [False, True, True, True]
    folds.put(*made[1], now=10.0)  # read again
    kept(folds, 1, 100, 10.0)
    assert [fold.kept for _, fold in made] == [False, True, False, True]
    folds.expire(601.0)
    assert [fold.kept for _, fold in made] == [False, True, False, False]
    folds.expire(611.0)
    assert (len(folds), folds.num_bytes) == (0, 0)


def test_open_ones_are_bounded_in_number() -> None:
    folds = KeptFolds(1 << 20, 600.0)
    for n in range(10):
        folds.put(Place("acme", bytes([n]) * 16, 3, 0), StreamFold(bytes([n]) * 16, "acme"), 0.0)
    assert len(folds) == 3
