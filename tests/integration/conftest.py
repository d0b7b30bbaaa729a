import asyncio
from collections.abc import Iterator

import pytest

from infra.local.broker import Broker


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
