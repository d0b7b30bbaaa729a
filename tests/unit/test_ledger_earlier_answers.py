"""What a tenant's records were answered with, found again in batch.results."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.headers import answer_headers, answered_request
from streams.ledger import earlier_answers
from streams.ledger.earlier_answers import AnswerPlaces, EarlierAnswers


def rid(n: int) -> bytes:
    return n.to_bytes(8, "big") + bytes(8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 8))
def test_the_first_place_of_the_latest_requests_is_remembered(puts: list[int], limit: int) -> None:
    places = AnswerPlaces(limit)
    expected: dict[int, int] = {}
    for offset, n in enumerate(puts):
        places.put(rid(n), offset)
        expected.setdefault(n, offset)
        if len(expected) > limit:
            del expected[next(iter(expected))]
    assert {n: places.get(rid(n)) for n in range(13)} == {n: expected.get(n) for n in range(13)}
    assert len(places) == len(expected)


class Log:
    """A results topic with one record a number; None is the end of a transaction, which no reader sees.
    `stuck_below`: what lies there is never read."""

    def __init__(self, *numbers: int | None, stuck_below: int = 0) -> None:
        self.numbers, self.stuck_below, self.at, self.reads = numbers, stuck_below, 0, 0

    async def beginning_offsets(self, tps: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(tps, 0)

    async def end_offsets(self, tps: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(tps, len(self.numbers))

    def assign(self, tps: list[Any]) -> None: ...

    def seek(self, tp: Any, offset: int) -> None:
        self.at = offset

    async def position(self, tp: Any) -> int:
        return self.at

    async def getmany(self, timeout_ms: int, max_records: int = 3) -> dict[Any, list[Any]]:
        if self.at < self.stuck_below:
            await asyncio.sleep(60)
        taken = range(self.at, min(self.at + max_records, len(self.numbers)))
        self.at, self.reads = taken.stop, self.reads + 1
        records = [
            SimpleNamespace(offset=i, value=b"%d" % i, headers=answer_headers(rid(n), None))
            for i in taken
            if (n := self.numbers[i]) is not None
        ]
        return {("batch.results.a", 0): records}


def earlier(log: Log, limit: int) -> EarlierAnswers:
    return EarlierAnswers(cast(Any, log), lambda topic, partition: (topic, partition), limit)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_answers, "_CHUNK", 4)
    monkeypatch.setattr(earlier_answers, "_LOAD_S", 0.2)


async def test_the_latest_answers_are_read_back_and_no_more() -> None:
    log = Log(*range(30), None, 29, 28)
    answers = earlier(log, limit=5)
    found = {n: await answers.find("a", rid(n)) for n in range(30)}
    assert {n: value for n, value in found.items() if value} == {n: b"%d" % n for n in range(25, 30)}
    answers.put("a", rid(99), 3)
    assert await answers.find("a", rid(25)) is None  # the oldest
    assert await answers.find("a", rid(99)) is None  # what lies there is another's answer


async def test_what_takes_too_long_to_read_back_is_not_remembered() -> None:
    answers = earlier(Log(*range(20), stuck_below=12), limit=100)
    task = asyncio.create_task(answers.find("a", rid(11)))
    await asyncio.sleep(0)
    answers.put("a", rid(15), 17)
    assert await task is None
    assert await answers.find("a", rid(12)) == b"12"
    assert await answers.find("a", rid(15)) == b"15"


def test_headers_of_an_answer_say_whose_it_is() -> None:
    headers = answer_headers(rid(7), "nächtlich")
    assert headers == [("request_id", rid(7).hex().encode()), ("batch", "nächtlich".encode())]
    assert answered_request(headers) == rid(7)
    assert answer_headers(None, None) == []
    for value in (None, b"", b"\xff", b"abc", b"ab" * 15):
        assert answered_request([("request_id", value)]) is None
