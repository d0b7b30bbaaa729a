"""A shard that is held has a coordinator, whatever became of the one before."""

import asyncio
from typing import cast

from schemas.records import Tenant
from streams.ledger.coordinator import ShardCoordinator
from streams.ledger.shards import Shards


class Coordinator:
    """Ends as one whose client raised the CancelledError of something else."""

    async def run(self) -> None:
        raise asyncio.CancelledError


async def test_one_that_ended_without_a_word_is_made_anew() -> None:
    made, second = [], asyncio.Event()

    def make(shard: int, tenants: object) -> ShardCoordinator:
        made.append(shard)
        if len(made) == 2:
            second.set()
        return cast(ShardCoordinator, Coordinator())

    shards = Shards(1, make)
    shards.put_tenant("acme", Tenant("acme", 0, [], []))
    shards.hold({2})
    running = asyncio.create_task(shards.run())
    await asyncio.wait_for(second.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(made) == {0}
