"""Offsets may be committed only behind `take`: it returns when the rows are stored, and else never."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.codec import encode
from schemas.records import Retry, Usage
from streams.ledger import usage_intake
from streams.ledger.billing import UsageRow
from streams.ledger.usage_intake import UsageIntake


@dataclass
class Message:
    offset: int
    value: bytes | None
    partition: int = 3
    key: bytes | None = None
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class Store:
    """Fails `failures` times, then stores."""

    def __init__(self, failures: int) -> None:
        self.failures, self.rows = failures, list[UsageRow]()

    def insert(self, rows: Sequence[UsageRow]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no ClickHouse")
        self.rows += rows


class Producer:
    """Takes dead letters, after `failures`."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.sent = failures, list[tuple[str, Any]]()

    async def send_and_wait(self, topic: str, value: Any, **rest: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no Kafka")
        self.sent.append((topic, rest))


async def _no_news() -> None: ...


def usage(n: int) -> bytes:
    return encode(Usage(bytes([n] * 16), 1, False, "demo", 2, "m", 1, 0, n, "stop", 1000, 1001, 0, 1))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_intake, "FIRST_RETRY_S", 0.001)


async def test_a_failing_store_is_tried_until_it_works() -> None:
    store = Store(failures=4)
    intake = UsageIntake(store, Producer(), _no_news)
    await intake.take([Message(5, usage(1)), Message(6, usage(2))])
    assert [row.output_tokens for row in store.rows] == [1, 2]
    assert intake.stored == {3: 7}
    assert intake.failing_since is None
    intake.close()


async def test_being_stopped_while_it_fails_is_no_success() -> None:
    store = Store(failures=10**9)
    intake = UsageIntake(store, Producer(), _no_news)
    task = asyncio.create_task(intake.take([Message(5, usage(1))]))
    await asyncio.sleep(0.05)
    assert intake.failing_since is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert intake.stored == {}
    intake.close()


async def test_bad_records_are_kept_and_the_rest_is_billed() -> None:
    store, producer = Store(0), Producer(failures=2)
    intake = UsageIntake(store, producer, _no_news)
    await intake.take(
        [
            Message(0, b"garbage", headers=[("request_id", b"x")]),
            Message(1, None),
            Message(2, encode(Retry(bytes(16), 1, 1, "x"))),
            Message(3, usage(9)),
        ]
    )
    assert [row.output_tokens for row in store.rows] == [9]
    assert [topic for topic, _ in producer.sent] == ["inference.usage.dlq"] * 3
    assert producer.sent[0][1]["partition"] == 3
    names = [name for name, _ in producer.sent[0][1]["headers"]]
    assert names == ["request_id", "reason"]
    intake.close()


async def test_a_schema_not_known_yet_is_looked_for() -> None:
    asked = 0

    async def catch_up() -> None:
        nonlocal asked
        asked += 1

    unknown = b"\xc3\x01" + bytes(8) + b"body"
    producer = Producer()
    intake = UsageIntake(Store(0), producer, catch_up)
    await intake.take([Message(0, unknown)])
    assert asked == 1
    assert len(producer.sent) == 1
    intake.close()
