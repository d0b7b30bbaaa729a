"""Logs that a library floods."""

import logging

from schemas.logs import OncePerSecond


def record(name: str, message: str, at: float, *args: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, __file__, 1, message, args, None)
    made.created = at
    return made


def test_the_same_is_said_once_a_second_with_how_often_it_was_left_out() -> None:
    once = OncePerSecond(["aiokafka"])
    said = [record("aiokafka.client", "no answer from %s", 100 + i / 10, i) for i in range(25)]
    passed = [each for each in said if once.filter(each)]
    assert [each.getMessage() for each in passed] == [f"no answer from {i}" for i in (0, 10, 20)]
    assert [getattr(each, "repeats", 0) for each in passed] == [0, 9, 9]


def test_other_things_and_other_loggers_are_left_alone() -> None:
    once = OncePerSecond(["aiokafka"])
    assert once.filter(record("aiokafka.client", "no answer", 100))
    assert once.filter(record("aiokafka.client", "an answer", 100))
    assert once.filter(record("aiokafka.fetcher", "no answer", 100))
    assert all(once.filter(record("gateway.outbox", "sent again", 100)) for _ in range(3))


def test_what_is_never_said_twice_is_not_remembered_for_ever() -> None:
    once = OncePerSecond(["aiokafka"])
    assert all(once.filter(record("aiokafka", f"thing {i}", 100)) for i in range(5_000))
    assert len(once._said) <= 1_000
