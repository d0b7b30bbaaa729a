"""A ledger that reads nothing any more, without an error, is told of."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
from aiokafka import TopicPartition

from schemas import topics
from streams.ledger import lag
from streams.ledger.metrics import LAG

PLACE = TopicPartition(topics.USAGE, 0)


class EndOffsets:
    async def end_offsets(self, partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, 100)


async def watch(stored: Mapping[int, int], seconds: float) -> None:
    async def committed(partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, 40)

    consumer: Any = EndOffsets()
    with mock.patch.multiple(lag, _LAG_S=0.002, _STUCK_S=0.05):
        watching = asyncio.create_task(lag.watch_lag(consumer, lambda: [PLACE], committed, stored))
        await asyncio.sleep(seconds)
        watching.cancel()
        await asyncio.wait([watching])


async def test_records_that_nobody_reads_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        await watch({0: 70}, 0.3)
    told = [record for record in caplog.records if record.message == "usage is not read any more"]
    assert told
    assert told[0].__dict__["records_behind"] == 30
    assert LAG.labels("0")._value.get() == 30


async def test_who_is_up_to_date_may_stand_still(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        await watch({0: 100}, 0.3)
    assert not caplog.records
