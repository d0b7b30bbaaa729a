import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.local.broker import Broker
from tests.own_broker import own_broker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A Kafka broker for tests that leave it as it is; use topic names of your own."""
    broker = Broker(tmp_path_factory.mktemp("broker"))
    try:
        asyncio.run(broker.start())
        yield broker
        asyncio.run(broker.stop())
    finally:
        broker.kill()


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The servers of a broker of the module's own, with the topics of its LAYOUT."""
    with own_broker(tmp_path_factory.mktemp("own-broker"), request.module.LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(name="own_broker")
async def broker_of_the_test(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker that the test may stop and kill, without topics."""
    broker = Broker(tmp_path)
    try:
        await broker.start()
        yield broker
    finally:
        broker.kill()
