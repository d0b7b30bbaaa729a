"""Offsets may be committed only behind `take`: it returns when the rows are stored, and else never."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas.codec import encode
from schemas.prices import price_key
from schemas.records import Price, Retry, Usage
from streams.ledger import usage_intake
from streams.ledger.billing import UsageRow
from streams.ledger.prices import PriceKeeper, PriceRow
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
        self.failures, self.rows, self.prices = failures, list[UsageRow](), list[PriceRow]()

    def insert(self, rows: Sequence[UsageRow]) -> None:
        self._fail()
        self.rows += rows

    def insert_prices(self, rows: Sequence[PriceRow]) -> None:
        self._fail()
        self.prices += rows

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no ClickHouse")


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


async def test_prices_are_stored_in_the_order_of_the_log_whatever_fails() -> None:
    store = Store(failures=3)
    intake = UsageIntake(store, Producer(), _no_news)
    keeper = PriceKeeper(intake.take_prices)
    key = price_key("m", 0, 1_764_446_000_000)
    keeper.tell(key, Price("m", 0, 1_764_446_000_000, "USD", "1", "0.5", "2"), 4)
    await keeper.settle()
    running = asyncio.create_task(keeper.run())
    keeper.tell(key, None, 7)
    async with asyncio.timeout(5):
        while len(store.prices) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    assert [(row.version, row.removed, row.input_price) for row in store.prices] == [
        (4, False, "1"),
        (7, True, "0"),
    ]
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


async def test_a_dead_letter_that_is_refused_for_good_holds_up_no_bill() -> None:
    class Narrow(Producer):
        async def send_and_wait(self, topic: str, value: Any, **rest: Any) -> None:
            if len(value) > 100:
                raise MessageSizeTooLargeError
            await super().send_and_wait(topic, value, **rest)

    store, producer = Store(0), Narrow(failures=2)
    intake = UsageIntake(store, producer, _no_news)
    async with asyncio.timeout(10):
        await intake.take([Message(0, b"x" * 101), Message(1, b"x" * 100), Message(2, usage(9))])
    assert len(producer.sent) == 1
    assert [row.output_tokens for row in store.rows] == [9]
    assert (intake.stored, intake.failing_since) == ({3: 3}, None)
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
