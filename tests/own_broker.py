"""A broker of a test's own, with the topics of a deployment."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas.topics import Layout


@contextmanager
def own_broker(data_dir: Path, layout: Layout) -> Iterator[Broker]:
    """For fixtures that are no coroutines. It is gone afterwards, whatever happens."""
    broker = Broker(data_dir)

    async def start() -> None:
        await broker.start()
        await create_topics(broker.bootstrap_servers, layout)

    try:
        asyncio.run(start())
        yield broker
        asyncio.run(broker.stop())
    finally:
        broker.kill()
