"""A producer whose acks the test gives."""

import asyncio
from typing import Any

from schemas.codec import decode


class HandProducer:
    """Stands in for the broker's acks, which a test could not hold back one by one."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Any, asyncio.Future[None]]] = []
        self.refuse: list[Exception] = []

    async def send(
        self, topic: str, value: bytes, partition: int, headers: object = None
    ) -> asyncio.Future[None]:
        if self.refuse:
            raise self.refuse.pop(0)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent.append((topic, partition, decode(value), future))
        return future

    async def flush(self) -> None:
        if waiting := [future for *_, future in self.sent if not future.done()]:
            await asyncio.wait(waiting)

    def ack(self, count: int = 1) -> None:
        for future in [f for *_, f in self.sent if not f.done()][:count]:
            future.set_result(None)

    @property
    def values(self) -> list[Any]:
        return [value for _, _, value, _ in self.sent]


async def settle() -> None:
    """Lets all tasks run that can."""
    for _ in range(10):
        await asyncio.sleep(0)
